from __future__ import annotations

from titan5d.schedules import catalog
from titan5d.schedules.simulate import StageTimes, simulate
from titan5d.schedules.text import text_gantt
from titan5d.schedules.timeline import Timeline


def of(name: str, p: int, v: int, m: int, **options: float) -> Timeline:
    schedule = catalog.build(name, p, v, m)
    return simulate(schedule, StageTimes.even(schedule, **{"f": 1, "b": 1, "w": 1, **options}))


def test_to_scale() -> None:
    assert text_gantt(of("1F1B", 2, 1, 3)) == (
        "rank 0  F0F1....B0--F2B1--..B2--\n"  #
        "rank 1  ..F0B0--F1B1--F2B2--...."
    )


def test_two_chunks_are_capitals_and_small_letters() -> None:
    assert text_gantt(of("ZBVZeroBubble", 2, 2, 2)) == (
        "rank 0  F0F1..f0i0w0f1i1w1I0W0..I1W1\n"  #
        "rank 1  ..F0f0F1f1i0w0I0W0i1w1I1W1.."
    )


def test_more_chunks_are_letters_behind() -> None:
    first = text_gantt(of("LoopedBFS", 1, 3, 1))
    assert first == "rank 0  F0aF0bF0cB0c---B0b---B0a---"


def test_pairs() -> None:
    assert "f2&B0-" in text_gantt(of("DualPipeV", 2, 2, 4))


def test_a_narrow_page_cuts_labels_not_time() -> None:
    lines = text_gantt(of("GPipe", 4, 1, 40), width=60).splitlines()
    assert all(len(line) == len("rank 0  ") + 60 for line in lines)
    assert lines[0].startswith("rank 0  F")


def test_actions_without_length_are_left_out() -> None:
    assert "W" not in text_gantt(of("InterleavedZeroBubble", 2, 1, 3, w=0))
    assert text_gantt(of("GPipe", 1, 1, 1, f=0, b=0, w=0)) == "rank 0  "
