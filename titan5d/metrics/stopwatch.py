"""Intervals of time by name, on the clock of the device, without ever waiting for it.

On a CPU the clock is the host's. On CUDA an interval lies between two events on the current stream: recording one
costs a microsecond or two, and they are read only when they have passed.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Adds up intervals. `begin = watch.mark(); ...; watch.add("forward", begin, watch.mark())`."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._pending: list[tuple[str, Any, Any]] = []

    def mark(self) -> Any:
        """Now: a point in time of this clock."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, begin: Any, end: Any) -> None:
        """Adds the time between two marks to `name`."""
        if self.on_cuda:
            self._pending.append((name, begin, end))
        else:
            self._seconds[name] = self._seconds.get(name, 0.0) + (end - begin)

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Intervals that the device has not reached yet are left for the next."""
        pending, self._pending = self._pending, []
        for name, begin, end in pending:
            if end.query():
                seconds = begin.elapsed_time(end) / 1000
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            else:
                self._pending.append((name, begin, end))
        taken, self._seconds = self._seconds, {}
        return taken
