"""The phases of a step: where its time goes, and where it stands right now.

    phases = StepPhases(device, meshes.groups())
    with phases("data"):
        batch = next(batches)
    with phases.step():
        with phases("forward"):
            ...

Times are those of the device (stopwatch.py) and nothing waits for them. A phase inside another stops the outer one, so
phases never overlap and what is in none of them is the rest of the step. Exposed communication (exposed.py) is part of
the phases it happens in.

`current` and `since` are written by the training thread and may be read by any other, such as a watchdog.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from titan5d.metrics.exposed import PREFIX, ExposedCommunication
from titan5d.metrics.stopwatch import Stopwatch

BETWEEN = "between phases"
"""`current` outside of all phases."""
LOGGED = ("forward", "backward", "optimizer", "messages")
"""The phases with a metric, `time_<phase>`; messages = waiting for other pipeline ranks. Data has its own."""


class StepPhases:
    """Times the phases of the steps of one rank.

    Args:
        groups: this rank's groups by axis, whose exposed communication is measured; None = of no axis.

    Attributes:
        current: the phase that is running, `BETWEEN` outside of all.
        since: time.monotonic() at its start.
        traced: name the phases in a running profiler, too.
        exposed: axis -> seconds a step this rank stood still for it, as of the last `metrics`.
    """

    def __init__(self, device: torch.device, groups: Mapping[str, dist.ProcessGroup] | None = None) -> None:
        self.device = device
        self.current, self.since = BETWEEN, time.monotonic()
        self.traced = False
        self.exposed: dict[str, float] = {}
        self._watch = Stopwatch(device)
        self._mark: Any = None
        self._steps = 0
        self._exposed = ExposedCommunication(groups or {}, self._watch)
        self._axes = [PREFIX + axis for axis in (*self._exposed.axes.shared, "other")]

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Counts the block as `phase`."""
        outer = self.current
        self._enter(phase)
        try:
            with torch.profiler.record_function(phase) if self.traced else nullcontext():
                yield
        finally:
            self._enter(outer)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Counts the block as one optimizer step, and watches its communication."""
        with self._exposed:
            yield
        self._steps += 1

    def _enter(self, phase: str) -> None:
        mark = self._watch.mark()
        if self.current != BETWEEN:
            self._watch.add(self.current, self._mark, mark)
        self.current, self.since, self._mark = phase, time.monotonic(), mark

    def metrics(self) -> dict[str, float]:
        """Seconds a step since the last call, the mean over all ranks: `time_forward`, ... for phases that were
        entered anywhere, `time_exposed/<axis>` for axes that were waited for. Collective."""
        names = [*LOGGED, *self._axes]
        mine, steps = self._watch.take(), max(self._steps, 1)
        self._steps = 0
        unknown = sum(value for name, value in mine.items() if name.startswith(PREFIX) and name not in names)
        mine[PREFIX + "other"] = mine.get(PREFIX + "other", 0.0) + unknown
        self.exposed = {name.removeprefix(PREFIX): mine.get(name, 0.0) / steps for name in self._axes}
        seconds = torch.tensor([mine.get(name, 0.0) / steps for name in names], dtype=torch.float64)
        seconds = seconds.to(self.device)
        dist.all_reduce(seconds)
        means = (seconds / dist.get_world_size()).tolist()
        return {f"time_{name}": mean for name, mean in zip(names, means, strict=True) if mean > 0}
