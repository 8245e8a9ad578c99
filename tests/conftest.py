"""For all tests: generated examples have no time limit of their own.

A busy machine stops a process for longer than any sensible limit on one example; the limit of the whole test stays.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
