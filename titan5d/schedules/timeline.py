"""When each action of a schedule ran: simulated (simulate.py) or measured in a run. Drawn by draw.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from titan5d.schedules.table import Schedule, Slot


class Span(NamedTuple):
    """One slot and the time it took, from `start` to `end` in any one unit of time."""

    slot: Slot
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """`spans[r]` are rank r's slots in the order they ran. All times share one clock and one unit."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def start(self) -> float:
        return min((row[0].start for row in self.spans if row), default=0.0)

    @property
    def end(self) -> float:
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @property
    def makespan(self) -> float:
        """From the first action of any rank to the last: the time of one optimizer step's pipeline."""
        return self.end - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """Time in actions, per rank. An Overlap counts once, not as its two parts."""
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Bubble time per rank: before its first action, between actions, after its last."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over all time, all ranks together: 0 = nobody ever waits. Ranks whose stages are cheaper
        than others' wait for them, and that counts here too."""
        total = self.makespan * len(self.spans)
        return sum(self.idle) / total if total > 0 else 0.0
