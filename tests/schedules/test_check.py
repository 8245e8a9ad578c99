"""Right tables broken in every way: each break is found and named."""

from __future__ import annotations

import random

import pytest

from titan5d.schedules import catalog
from titan5d.schedules.check import check, problems
from titan5d.schedules.table import Action, Overlap, Schedule, ScheduleError, Slot


def with_row(schedule: Schedule, rank: int, row: list[Slot]) -> Schedule:
    rows = list(schedule.rows)
    rows[rank] = tuple(row)
    return Schedule(schedule.name, schedule.microbatches, schedule.rank_of_stage, tuple(rows))


def test_missing_double_and_both_ways() -> None:
    schedule = catalog.build("1F1B", 2, 1, 3)
    row = list(schedule.rows[1])

    missing = with_row(schedule, 1, [slot for slot in row if slot != Action(1, "B", 2)])
    assert problems(missing) == ["stage 1 (rank 1) lacks 1B2 (backward: B, or I and W)"]

    double = with_row(schedule, 1, [*row, Action(1, "F", 1)])
    assert problems(double) == ["1F1 is there 2 times on rank 1: once is right"]

    both = with_row(schedule, 1, [*row, Action(1, "I", 0), Action(1, "W", 0)])
    assert problems(both) == [
        "stage 1 has a whole backward B and I and W for micro-batch 0 (rank 1): either B, or I and W"
    ]

    half = with_row(schedule, 1, [Action(1, "I", 0) if slot == Action(1, "B", 0) else slot for slot in row])
    assert problems(half) == ["stage 1 (rank 1) lacks 1W0 (weight gradient, the other half of its I)"]


def test_many_missing_are_counted_not_listed() -> None:
    schedule = catalog.build("GPipe", 2, 1, 50)
    forwards = [slot for slot in schedule.rows[0] if isinstance(slot, Action) and slot.kind == "F"]
    [line] = problems(with_row(schedule, 0, list(forwards)))
    assert line == "stage 0 (rank 0) lacks 0B0, 0B1, 0B2, 0B3, 0B4, 0B5 and 44 more (backward: B, or I and W)"


def test_places() -> None:
    schedule = catalog.build("GPipe", 2, 1, 2)
    row = list(schedule.rows[0])
    assert problems(with_row(schedule, 0, [*row, Action(1, "F", 0)])) == [
        "rank 0 has 1F0, but stage 1 is on rank 1"
    ]
    assert problems(with_row(schedule, 0, [*row, Action(5, "F", 0), Action(0, "F", 2)])) == [
        "rank 0 has 5F0, but the stages are 0 to 1: there is no stage 5",
        "rank 0 has 0F2, but the micro-batches are 0 to 1: there is no micro-batch 2",
    ]


def test_order_within_a_stage() -> None:
    schedule = catalog.build("InterleavedZeroBubble", 1, 1, 1)
    f, i, w = (Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0))
    assert list(schedule.rows[0]) == [f, i, w]
    assert problems(with_row(schedule, 0, [f, w, i])) == [
        "rank 0 has 0W0 (action 2 of its row) before 0I0 (action 3): the input gradient comes first"
    ]
    assert problems(with_row(schedule, 0, [i, f, w])) == [
        "rank 0 has 0I0 (action 1 of its row) before 0F0 (action 2): the forward comes first"
    ]


def test_overlaps() -> None:
    f, b = Action(0, "F", 0), Action(0, "B", 0)
    one = Schedule("x", 1, (0,), ((Overlap(f, b),),))
    assert problems(one) == [
        "rank 0 has 0B0 (action 1 of its row) in the same slot as 0F0 (action 1): the forward comes first"
    ]
    two = Schedule("x", 2, (0,), ((f, Action(0, "F", 1), Overlap(b, Action(0, "B", 1))),))
    assert problems(two) == ["rank 0 has (0B0;0B1)OVERLAP_F_B: an OVERLAP_F_B holds one F and one B (or I)"]


def test_deadlock() -> None:
    schedule = catalog.build("1F1B", 2, 1, 2)
    first = [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)]
    second = [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1)]
    found = problems(with_row(with_row(schedule, 0, list(first)), 1, list(second)))
    assert len(found) == 2
    assert all("can never start" in line for line in found)


def test_a_forward_only_table_has_no_backward() -> None:
    forwards = catalog.build("1F1B", 2, 1, 2).forwards()
    rows = ((*forwards.rows[0], Action(0, "B", 1)), forwards.rows[1])
    wrong = Schedule("x", 2, forwards.rank_of_stage, rows, forward_only=True)
    assert problems(wrong) == ["stage 0 has a backward of micro-batch 1 in a forward-only table"]


@pytest.mark.parametrize("name", catalog.NAMES)
def test_random_damage_is_found(name: str) -> None:
    draw = random.Random(name)
    schedule = catalog.build(name, 4, catalog.default_chunks(name), 9)
    for _ in range(30):
        rank = draw.randrange(4)
        row = list(schedule.rows[rank])
        at = draw.randrange(len(row))
        damaged = [
            row[:at] + row[at + 1 :],  # lost
            row[: at + 1] + row[at:],  # twice
            [*row[:at], *row[at + 1 :], row[at]] if at < len(row) // 2 else None,  # at the end
        ]
        for new_row in damaged[:2]:
            assert new_row is not None and problems(with_row(schedule, rank, new_row))
        # A forward moved behind its backward is found; where it only runs later, the table stays right.
        late = damaged[2]
        slot = row[at]
        if late is not None and isinstance(slot, Action) and slot.kind == "F":
            assert problems(with_row(schedule, rank, late))


def test_check_raises_all() -> None:
    schedule = catalog.build("GPipe", 2, 1, 2)
    broken = Schedule("x", 2, schedule.rank_of_stage, (schedule.rows[0][1:], schedule.rows[1][:-1]))
    with pytest.raises(ScheduleError, match="lacks 0F0") as refused:
        check(broken)
    assert len(refused.value.problems) == 2
    check(schedule)
