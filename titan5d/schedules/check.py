"""Is a table a schedule? Every stage does every micro-batch once, in an order that comes to an end.

Builders are proven by tests, so this is for tables that come from outside (csv.py) and for those tests.
"""

from __future__ import annotations

from collections import Counter

from titan5d.schedules.simulate import play
from titan5d.schedules.table import KIND_NAMES, Action, Overlap, Schedule, ScheduleError, parts


def check(schedule: Schedule) -> None:
    """Raises ScheduleError with everything `problems` finds."""
    found = problems(schedule)
    if found:
        raise ScheduleError(found)


def problems(schedule: Schedule) -> list[str]:
    """Everything wrong with the table; empty when it can run.

    What is looked for: actions on a rank that does not hold their stage, or outside the numbers of stages and
    micro-batches; actions missing or there twice; a wrong order within one (stage, micro-batch); Overlaps
    that are no forward and backward; and, when all that is right, ranks that would wait for each other
    forever.
    """
    found = _placement(schedule)
    if found:
        return found  # the questions below would only repeat it
    found = _coverage(schedule) + _order(schedule) + _overlaps(schedule)
    if found:
        return found
    try:
        play(schedule, lambda slot: 1.0, comm=0.0)
    except ScheduleError as deadlock:
        return deadlock.problems
    return []


def _placement(schedule: Schedule) -> list[str]:
    """Actions where they cannot be."""
    found = []
    for rank in range(schedule.n_ranks):
        for action in schedule.actions(rank):
            if not 0 <= action.stage < schedule.n_stages:
                found.append(
                    f"rank {rank} has {action}, but the stages are 0 to {schedule.n_stages - 1}: "
                    f"there is no stage {action.stage}"
                )
            elif schedule.rank_of_stage[action.stage] != rank:
                holder = schedule.rank_of_stage[action.stage]
                found.append(f"rank {rank} has {action}, but stage {action.stage} is on rank {holder}")
            if not 0 <= action.microbatch < schedule.microbatches:
                found.append(
                    f"rank {rank} has {action}, but the micro-batches are 0 to {schedule.microbatches - 1}: "
                    f"there is no micro-batch {action.microbatch}"
                )
    return found


def _coverage(schedule: Schedule) -> list[str]:
    """Each stage runs F once per micro-batch, and either B once, or I and W once each."""
    count = Counter(action for rank in range(schedule.n_ranks) for action in schedule.actions(rank))
    found = [
        f"{action} is there {times} times on rank {schedule.rank_of_stage[action.stage]}: once is right"
        for action, times in sorted(count.items())
        if times > 1
    ]
    for stage, rank in enumerate(schedule.rank_of_stage):
        missing: dict[str, list[int]] = {}
        for microbatch in range(schedule.microbatches):
            whole, first, second = (Action(stage, kind, microbatch) in count for kind in ("B", "I", "W"))
            if Action(stage, "F", microbatch) not in count:
                missing.setdefault("F", []).append(microbatch)
            if schedule.forward_only:
                if whole or first or second:
                    found.append(
                        f"stage {stage} has a backward of micro-batch {microbatch} in a forward-only table"
                    )
            elif whole and (first or second):
                halves = " and ".join(kind for kind, there in (("I", first), ("W", second)) if there)
                found.append(
                    f"stage {stage} has a whole backward B and {halves} for micro-batch {microbatch} "
                    f"(rank {rank}): either B, or I and W"
                )
            elif not (whole or first or second):
                missing.setdefault("B", []).append(microbatch)
            elif not whole and not first:
                missing.setdefault("I", []).append(microbatch)
            elif not whole and not second:
                missing.setdefault("W", []).append(microbatch)
        found += [_missing_line(stage, rank, kind, which) for kind, which in missing.items()]
    return found


def _missing_line(stage: int, rank: int, kind: str, microbatches: list[int]) -> str:
    shown = ", ".join(f"{stage}{kind}{microbatch}" for microbatch in microbatches[:6])
    more = f" and {len(microbatches) - 6} more" if len(microbatches) > 6 else ""
    meaning = {
        "F": KIND_NAMES["F"],
        "B": "backward: B, or I and W",
        "I": f"{KIND_NAMES['I']}, the other half of its W",
        "W": f"{KIND_NAMES['W']}, the other half of its I",
    }
    return f"stage {stage} (rank {rank}) lacks {shown}{more} ({meaning[kind]})"


def _order(schedule: Schedule) -> list[str]:
    """Within one (stage, micro-batch): F before B or I, I before W."""
    found = []
    for rank, row in enumerate(schedule.rows):
        place: dict[Action, int] = {}
        for index, slot in enumerate(row):
            for action in parts(slot):
                place.setdefault(action, index)
        for action, index in place.items():
            before = Action(action.stage, "I" if action.kind == "W" else "F", action.microbatch)
            if action.kind != "F" and before in place and place[before] >= index:
                side = "in the same slot as" if place[before] == index else "before"
                found.append(
                    f"rank {rank} has {action} (action {index + 1} of its row) {side} {before} "
                    f"(action {place[before] + 1}): the {KIND_NAMES[before.kind]} comes first"
                )
    return found


def _overlaps(schedule: Schedule) -> list[str]:
    """An Overlap is a forward, and a backward or input gradient."""
    return [
        f"rank {rank} has {slot}: an OVERLAP_F_B holds one F and one B (or I)"
        for rank, row in enumerate(schedule.rows)
        for slot in row
        if isinstance(slot, Overlap) and (slot.forward.kind != "F" or slot.backward.kind not in ("B", "I"))
    ]
