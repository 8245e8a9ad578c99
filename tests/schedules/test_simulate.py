from __future__ import annotations

import pytest

from titan5d.schedules import catalog
from titan5d.schedules.simulate import StageTimes, simulate, time_slots
from titan5d.schedules.table import Action, Overlap, Schedule, ScheduleError


def table(*rows: str, places: tuple[int, ...], m: int) -> Schedule:
    """Rows like "0F0 0B0" with one-digit numbers."""

    def action(text: str) -> Action:
        kind = text[1]
        assert kind in "FBIW"
        return Action(int(text[0]), kind, int(text[2]))  # type: ignore[arg-type]

    return Schedule("test", m, places, tuple(tuple(action(text) for text in row.split()) for row in rows))


def test_by_hand_with_uneven_stages_and_messages() -> None:
    schedule = table("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1", places=(0, 1), m=2)
    times = StageTimes(forward=(2, 3), input_grad=(4, 1), weight_grad=(1, 2), comm=0.5)
    timeline = simulate(schedule, times)
    assert [[(str(s.slot), s.start, s.end) for s in row] for row in timeline.spans] == [
        # 1B0 ends at 8.5 and its gradient is there at 9; 1I1 ends at 12.5.
        [("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 9, 14), ("0B1", 14, 19)],
        [("1F0", 2.5, 5.5), ("1B0", 5.5, 8.5), ("1F1", 8.5, 11.5), ("1I1", 11.5, 12.5), ("1W1", 12.5, 14.5)],
    ]
    assert timeline.makespan == 19
    assert timeline.busy == (14, 12)
    assert timeline.idle == (5, 7)
    assert timeline.bubble_fraction == pytest.approx(12 / 38)


def test_a_stage_on_the_same_rank_needs_no_message() -> None:
    schedule = table("0F0 1F0 1B0 0B0", places=(0, 0), m=1)
    assert simulate(schedule, StageTimes((1, 1), (1, 1), (1, 1), comm=100)).makespan == 6


def test_the_whole_backward_sends_its_input_gradient_when_it_is_done_and_the_split_one_sooner() -> None:
    whole = table("0F0 0B0", "1F0 1B0", places=(0, 1), m=1)
    split = table("0F0 0B0", "1F0 1I0 1W0", places=(0, 1), m=1)
    times = StageTimes((1, 1), (1, 1), (1, 1))
    assert simulate(whole, times).makespan == 6
    assert simulate(split, times).makespan == 5


@pytest.mark.parametrize(("overlap", "length"), [(0.0, 5.0), (0.5, 4.0), (1.0, 3.0)])
def test_overlap_hides_part_of_the_shorter_side(overlap: float, length: float) -> None:
    pair = Overlap(Action(0, "F", 1), Action(0, "B", 0))
    schedule = Schedule("x", 2, (0,), ((Action(0, "F", 0), pair, Action(0, "B", 1)),))
    timeline = simulate(schedule, StageTimes((2,), (1,), (2,), overlap=overlap))
    assert timeline.makespan == 2 + length + 3
    assert timeline.idle == (0,)


def test_one_rank_has_no_bubble() -> None:
    for name in catalog.NAMES:
        schedule = catalog.build(name, 1, catalog.default_chunks(name), 5)
        timeline = simulate(schedule, StageTimes.even(schedule, 1, 1, 1))
        assert timeline.makespan == pytest.approx(15)
        assert timeline.bubble_fraction == pytest.approx(0)


def test_times_that_do_not_fit_are_refused_together() -> None:
    schedule = catalog.build("GPipe", 2, 1, 1)
    with pytest.raises(ScheduleError) as refused:
        simulate(schedule, StageTimes((1,), (1, -2), (1, float("nan")), comm=-1, overlap=1.5))
    text = str(refused.value)
    assert len(refused.value.problems) == 5
    for words in ("forward has 1 times", "2 stages", "-2", "nan", "comm is -1", "overlap is 1.5"):
        assert words in text


def test_a_deadlock_ends_and_names_who_waits_for_what() -> None:
    schedule = table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", places=(0, 1), m=2)
    with pytest.raises(ScheduleError) as refused:
        simulate(schedule, StageTimes((1, 1), (1, 1), (1, 1)))
    assert refused.value.problems == [
        "rank 0 can never start 0B0 (action 2 of its row): it needs the input gradient of stage 1 "
        "for micro-batch 0, which rank 1 makes, which stands at 1F1",
        "rank 1 can never start 1F1 (action 2 of its row): it needs the forward of stage 0 "
        "for micro-batch 1, which rank 0 makes, which stands at 0B0",
    ]


def test_a_weight_gradient_waits_for_its_input_gradient() -> None:
    with pytest.raises(
        ScheduleError, match=r"rank 0 can never start 0W0 .* which comes later in the same row"
    ):
        simulate(table("0F0 0W0 0I0", places=(0,), m=1), StageTimes((1,), (1,), (1,)))
    with pytest.raises(ScheduleError, match=r"rank 1 can never start 1F0 .* which rank 0 never makes"):
        simulate(table("", "1F0", places=(0, 1), m=1), StageTimes((1, 1), (1, 1), (1, 1)))


def test_time_slots() -> None:
    grid = time_slots(catalog.build("1F1B", 2, 1, 3))
    assert [["." if slot is None else str(slot) for slot in row] for row in grid] == [
        ["0F0", "0F1", ".", "0B0", "0F2", "0B1", ".", "0B2"],
        [".", "1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "."],
    ]


def test_a_large_table_is_quick() -> None:
    """64 ranks, 2 chunks, 256 micro-batches: 65,536 actions. Work growing with their square would not end."""
    schedule = catalog.build("Interleaved1F1B", 64, 2, 256)
    timeline = simulate(schedule, StageTimes.even(schedule, 1, 1, 1))
    assert timeline.idle[0] == pytest.approx(63 * 3 / 2)
