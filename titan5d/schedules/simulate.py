"""Plays a schedule against a clock: given how long each stage takes, when does every action start and end?

Each rank works through its row in order. An action starts when the rank is free and its inputs have arrived:

    F of stage s    after  F of stage s - 1
    B or I          after  F of the same stage, and B or I of stage s + 1
    W               after  I of the same stage

An input made on another rank arrives `comm` later; sending costs the ranks themselves no time. Nothing else
is modelled, which is why the closed forms of the papers can be met exactly (docs/schedules.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from titan5d.schedules.table import Action, Overlap, Schedule, ScheduleError, Slot, parts
from titan5d.schedules.timeline import Span, Timeline

Output = tuple[str, int, int]
"""What an action makes and others wait for: ("F", stage, microbatch), and "I" for an input gradient, whether
a whole backward made it or its first half."""


@dataclass(frozen=True)
class StageTimes:
    """How long one micro-batch takes in each stage, in any one unit of time. The whole backward takes
    `input_grad + weight_grad`. `overlap` is how much of the shorter side of an Overlap is hidden behind the
    longer one: 0 = they run one after the other, 1 = the shorter one costs nothing."""

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    comm: float = 0.0
    overlap: float = 0.0

    @staticmethod
    def even(
        schedule: Schedule, f: float, b: float, w: float, comm: float = 0.0, overlap: float = 0.0
    ) -> StageTimes:
        """Times of a model cut evenly: `f`, `b` (input gradient) and `w` are for all the stages of one rank
        together, so that schedules with different numbers of chunks do the same work."""
        stages = [len(schedule.stages_of_rank(rank)) for rank in schedule.rank_of_stage]

        def each(time: float) -> tuple[float, ...]:
            return tuple(time / count for count in stages)

        return StageTimes(each(f), each(b), each(w), comm, overlap)

    def of(self, slot: Slot) -> float:
        """The length of a slot."""
        if isinstance(slot, Overlap):
            forward, backward = self.of(slot.forward), self.of(slot.backward)
            return forward + backward - self.overlap * min(forward, backward)
        stage = slot.stage
        if slot.kind == "F":
            return self.forward[stage]
        if slot.kind == "I":
            return self.input_grad[stage]
        if slot.kind == "W":
            return self.weight_grad[stage]
        return self.input_grad[stage] + self.weight_grad[stage]

    def problems(self, n_stages: int) -> list[str]:
        """Why these times do not fit a schedule of `n_stages` stages; empty when they do."""
        found = []
        for name, times in (
            ("forward", self.forward),
            ("input_grad", self.input_grad),
            ("weight_grad", self.weight_grad),
        ):
            if len(times) != n_stages:
                found.append(f"{name} has {len(times)} times, but the schedule has {n_stages} stages")
            bad = [time for time in times if not (isfinite(time) and time >= 0)]
            if bad:
                found.append(f"{name} has the time {bad[0]}: times are finite and at least 0")
        if not (isfinite(self.comm) and self.comm >= 0):
            found.append(f"comm is {self.comm}: it is a time, finite and at least 0")
        if not 0 <= self.overlap <= 1:
            found.append(f"overlap is {self.overlap}: it is a fraction from 0 to 1")
        return found


def simulate(schedule: Schedule, times: StageTimes) -> Timeline:
    """When each action runs. Raises ScheduleError if the times do not fit, or if the ranks would wait for
    each other forever."""
    problems = times.problems(schedule.n_stages)
    if problems:
        raise ScheduleError(problems)
    return Timeline(schedule, play(schedule, times.of, times.comm))


def time_slots(schedule: Schedule) -> list[list[Slot | None]]:
    """The table as a grid, one list per rank: what each rank does in time slot 0, 1, 2, ... when every slot
    takes one unit of time; None = it waits."""
    spans = play(schedule, lambda slot: 1.0, comm=0.0)
    n_slots = int(max((row[-1].end for row in spans if row), default=0))
    grid: list[list[Slot | None]] = [[None] * n_slots for _ in spans]
    for line, row in zip(grid, spans, strict=True):
        for span in row:
            line[int(span.start)] = span.slot
    return grid


def play(schedule: Schedule, length: Callable[[Slot], float], comm: float) -> tuple[tuple[Span, ...], ...]:
    """The spans of each rank. Raises ScheduleError when the ranks wait for each other forever.

    Runs one rank until it lacks an input, then another; an output that appears wakes the ranks that lacked
    it. So the work is linear in the number of actions, and no clock ticks through empty time.
    """
    spans: list[list[Span]] = [[] for _ in schedule.rows]
    finished: dict[Output, float] = {}
    lacking: dict[Output, list[int]] = {}
    runnable = list(range(schedule.n_ranks))
    while runnable:
        rank = runnable.pop()
        row = schedule.rows[rank]
        while len(spans[rank]) < len(row):
            slot = row[len(spans[rank])]
            needed = [each for action in parts(slot) for each in inputs(action, schedule.n_stages)]
            missing = next((each for each in needed if each not in finished), None)
            if missing is not None:
                lacking.setdefault(missing, []).append(rank)
                break
            start = spans[rank][-1].end if spans[rank] else 0.0
            for each in needed:
                here = schedule.rank_of_stage[each[1]] == rank
                start = max(start, finished[each] + (0.0 if here else comm))
            spans[rank].append(Span(slot, start, start + length(slot)))
            for action in parts(slot):
                for made in outputs(action):
                    finished[made] = spans[rank][-1].end
                    runnable += lacking.pop(made, [])
    if lacking:
        raise ScheduleError(_who_waits(schedule, [len(row) for row in spans], lacking))
    return tuple(tuple(row) for row in spans)


def inputs(action: Action, n_stages: int) -> list[Output]:
    """What must be finished before `action` can start."""
    stage, kind, microbatch = action
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage > 0 else []
    if kind == "W":
        return [("I", stage, microbatch)]
    own_forward: Output = ("F", stage, microbatch)
    return [own_forward, ("I", stage + 1, microbatch)] if stage + 1 < n_stages else [own_forward]


def outputs(action: Action) -> list[Output]:
    """What `action` makes for others."""
    if action.kind == "W":
        return []
    return [("F" if action.kind == "F" else "I", action.stage, action.microbatch)]


def _who_waits(schedule: Schedule, position: list[int], lacking: dict[Output, list[int]]) -> list[str]:
    """One line for each rank that stands still."""
    lines = []
    for (kind, stage, microbatch), ranks in lacking.items():
        what = "forward" if kind == "F" else "input gradient"
        maker = schedule.rank_of_stage[stage]
        for rank in ranks:
            slot = schedule.rows[rank][position[rank]]
            if maker == rank:
                source = "comes later in the same row"
            elif position[maker] < len(schedule.rows[maker]):
                source = f"rank {maker} makes, which stands at {schedule.rows[maker][position[maker]]}"
            else:
                source = f"rank {maker} never makes"
            lines.append(
                f"rank {rank} can never start {slot} (action {position[rank] + 1} of its row): it needs the "
                f"{what} of stage {stage} for micro-batch {microbatch}, which {source}"
            )
    return sorted(lines)
