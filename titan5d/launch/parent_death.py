"""Processes that end with the one that started them, also when that is killed outright (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

PR_SET_PDEATHSIG = 1


def signal_at_parents_death(number: int) -> None:
    """From now on this process gets signal `number` when the thread that started it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """On a rank of torchrun: no rank trains on, and writes checkpoints, beside those that take its place."""
    if "TORCHELASTIC_RUN_ID" in environ:
        signal_at_parents_death(signal.SIGKILL)
