"""When each slot of a pipeline schedule really ran: the measured twin of schedules/simulate.py.

A slot is timed from the moment its inputs are there to its end, so waiting is what lies between slots: idle time, as
in a simulation. All ranks of a pipeline start their clocks together, at a barrier before the step. On CUDA the times
are those of the device, taken by events between its kernels.

    <run folder>/profile_traces/pipeline/step-N/   rank-R.json   slots of each rank, seconds from the barrier
                                                   timeline.json all ranks of the pipeline that rank 0 is in
                                                   timeline.svg  the picture of it
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan5d.schedules.draw import svg
from titan5d.schedules.table import Schedule, Slot
from titan5d.schedules.timeline import Span, Timeline


class PipelineTrace:
    """Times the slots of one rank.

    Args:
        group: the ranks of this pipeline, in order.
        folder: the run's folder for traces.
    """

    def __init__(
        self, schedule: Schedule, group: dist.ProcessGroup, device: torch.device, folder: Path
    ) -> None:
        self.schedule, self.group, self.device = schedule, group, device
        self.folder = folder / "pipeline"
        self.start_mark: Any = None
        self.marks: list[tuple[Slot, Any, Any]] = []

    def start_step(self) -> None:
        """Starts the clock anew, together with the other ranks of the pipeline."""
        self.marks = []
        dist.barrier(self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.start_mark = self._now()

    def run_slot(self, slot: Slot, work: Callable[[], None]) -> None:
        """Runs `work`, which is what `slot` does, and notes when it began and ended."""
        begin = self._now()
        work()
        self.marks.append((slot, begin, self._now()))

    def timeline(self) -> Timeline:
        """The last step on all ranks of the pipeline, in seconds. Collective."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        mine = [(self._seconds(begin), self._seconds(end)) for _, begin, end in self.marks]
        rows: list[list[tuple[float, float]]] = [[] for _ in range(self.schedule.n_ranks)]
        dist.all_gather_object(rows, mine, group=self.group)
        spans = tuple(
            tuple(Span(slot, *times) for slot, times in zip(slots, row, strict=True))
            for slots, row in zip(self.schedule.rows, rows, strict=True)
        )
        return Timeline(self.schedule, spans)

    def write(self, step: int) -> dict[str, float]:
        """Writes the last step's files. Returns its metrics: `pipeline_bubble`, the share of all ranks' time from
        the first slot to the last in which they ran none; nothing after a step that ran no slot. Collective."""
        if not self.marks:
            return {}
        timeline = self.timeline()
        folder = self.folder / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        row, rank = self.group.rank(), dist.get_rank()
        own = {"step": step, "rank": rank, "pipeline_rank": row, "slots": _slots(timeline, row)}
        self.marks = []
        (folder / f"rank-{rank}.json").write_text(json.dumps(own), encoding="utf-8")
        if rank == 0:
            merged = {
                "step": step,
                "schedule": self.schedule.name,
                "microbatches": self.schedule.microbatches,
                "makespan_seconds": timeline.makespan,
                "bubble": timeline.bubble_fraction,
                "idle_seconds": timeline.idle,
                "ranks": [_slots(timeline, each) for each in range(self.schedule.n_ranks)],
            }
            (folder / "timeline.json").write_text(json.dumps(merged), encoding="utf-8")
            (folder / "timeline.svg").write_text(svg([_in_milliseconds(timeline)], unit="ms"), encoding="utf-8")
        return {"pipeline_bubble": timeline.bubble_fraction}

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        """From the start of the step."""
        if self.device.type != "cuda":
            return float(mark - self.start_mark)
        return float(self.start_mark.elapsed_time(mark)) / 1000


def _slots(timeline: Timeline, rank: int) -> list[dict[str, object]]:
    return [
        {"slot": str(span.slot), "start": span.start, "end": span.end} for span in timeline.spans[rank]
    ]


def _in_milliseconds(timeline: Timeline) -> Timeline:
    first = timeline.start
    rows = (
        tuple(Span(span.slot, 1000 * (span.start - first), 1000 * (span.end - first)) for span in row)
        for row in timeline.spans
    )
    return Timeline(timeline.schedule, tuple(rows))
