from __future__ import annotations

import pytest

from titan5d.schedules import catalog
from titan5d.schedules.table import ScheduleError


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "words"),
    [
        ("1F1B", 4, 1, 0, ["0 micro-batches", "at least 1", "4 or more"]),
        ("1F1B", 0, 1, 4, ["0 ranks", "at least 1"]),
        ("1F1B", 4, 2, 8, ["1 chunk", "got 2", "Interleaved1F1B"]),
        ("GPipe", 4, 3, 8, ["1 chunk", "got 3", "LoopedBFS"]),
        ("LoopedBFS", 4, 1, 8, ["2 or more", "got 1", "GPipe"]),
        ("Interleaved1F1B", 4, 1, 8, ["2 or more", "got 1", "1F1B"]),
        ("InterleavedZeroBubble", 4, 0, 8, ["0 chunks", "at least 1"]),
        ("ZBVZeroBubble", 4, 3, 8, ["exactly 2", "got 3"]),
        ("DualPipeV", 4, 1, 8, ["exactly 2", "got 1"]),
        ("1f1b", 4, 1, 8, ["'1f1b'", "1F1B", "DualPipeV"]),
    ],
)
def test_refusals_name_the_numbers_and_what_would_work(
    name: str, p: int, v: int, m: int, words: list[str]
) -> None:
    problem = catalog.microbatch_problem(name, p, v, m)
    assert problem is not None
    for word in words:
        assert word in problem
    with pytest.raises(ScheduleError) as refused:
        catalog.build(name, p, v, m)
    assert refused.value.problems == [problem]


@pytest.mark.parametrize("name", catalog.NAMES)
def test_any_number_of_micro_batches_and_the_name_stays(name: str) -> None:
    v = catalog.default_chunks(name)
    for m in (1, 2, 3, 5, 8, 13):
        assert catalog.microbatch_problem(name, 4, v, m) is None
        schedule = catalog.build(name, 4, v, m)
        assert (schedule.name, schedule.microbatches, schedule.n_ranks) == (name, m, 4)
        assert schedule.rank_of_stage == catalog.rank_of_stage(name, 4, v)


def test_split_backward_is_told_truly() -> None:
    for name in catalog.NAMES:
        schedule = catalog.build(name, 4, catalog.default_chunks(name), 8)
        kinds = {action.kind for rank in range(4) for action in schedule.actions(rank)}
        assert ("W" in kinds) == (name in catalog.SPLIT_BACKWARD)
