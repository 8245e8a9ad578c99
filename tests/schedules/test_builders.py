"""Simulated against the papers' closed forms, which are met exactly: idle time per rank, for every rank.

f, b, w below are the times of one micro-batch in all of a rank's stages, b the input gradient's.
"""

from __future__ import annotations

import pytest

from titan5d.schedules.builders import (
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
)
from titan5d.schedules.catalog import build
from titan5d.schedules.simulate import StageTimes, simulate
from titan5d.schedules.table import Action, Schedule

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 1.5, 1.0), (0.5, 1.0, 0.25)]
P = (4, 8)


def idle(schedule: Schedule, f: float, b: float, w: float) -> list[float]:
    timeline = simulate(schedule, StageTimes.even(schedule, f, b, w))
    # Nothing but the asked work is done: idle time is all of the bubble.
    assert timeline.busy == pytest.approx([schedule.microbatches * (f + b + w)] * schedule.n_ranks, abs=1e-9)
    return list(timeline.idle)


def exactly(value: float, p: int) -> object:
    return pytest.approx([value] * p, abs=1e-9)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize(("f", "b", "w"), TIMES)
def test_gpipe_and_1f1b_wait_p_minus_1_forwards_and_backwards(p: int, f: float, b: float, w: float) -> None:
    for m in (1, p - 1, p, 2 * p, 3 * p + 1):
        assert idle(gpipe(p, m), f, b, w) == exactly((p - 1) * (f + b + w), p)
        assert idle(one_f_one_b(p, m), f, b, w) == exactly((p - 1) * (f + b + w), p)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("f", "b", "w"), TIMES)
def test_chunks_divide_the_bubble(p: int, v: int, f: float, b: float, w: float) -> None:
    for m in (p, p + 1, 2 * p - 1, 2 * p, 2 * p + 3, 5 * p):  # multiples of p and others
        assert idle(looped_bfs(p, v, m), f, b, w) == exactly((p - 1) * (f + b + w) / v, p)
        assert idle(interleaved_1f1b(p, v, m), f, b, w) == exactly((p - 1) * (f + b + w) / v, p)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("v", [2, 4])
def test_fewer_micro_batches_than_ranks_wait_once_more_per_chunk(p: int, v: int) -> None:
    """m < p: each of the v - 1 times that a round comes back to rank 0, that rank has waited p - m slots."""
    for m in range(1, p):
        law = ((p - 1) + (p - m) * (v - 1)) * 3 / v
        assert idle(looped_bfs(p, v, m), 1, 1, 1) == exactly(law, p)
        assert idle(interleaved_1f1b(p, v, m), 1, 1, 1) == exactly(law, p)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize(("f", "b", "w"), TIMES)
def test_interleaved_zero_bubble_waits_f_plus_i_minus_w(p: int, v: int, f: float, b: float, w: float) -> None:
    for m in (p, p + 1, 2 * p - 1, 2 * p, 2 * p + 3, 5 * p):
        assert idle(interleaved_zero_bubble(p, v, m), f, b, w) == exactly((p - 1) * (f + b - w) / v, p)


def test_weight_gradients_longer_than_input_gradients_cannot_fill_more_than_the_backward() -> None:
    for p in P:
        assert idle(interleaved_zero_bubble(p, 2, 2 * p), 1, 0.75, 1.25) == exactly((p - 1) * 1 / 2, p)


@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("GPipe", 27.3),
        ("1F1B", 27.3),
        ("LoopedBFS", 15.8),
        ("Interleaved1F1B", 15.8),
        ("InterleavedZeroBubble", 5.9),
        ("ZBVZeroBubble", 5.9),
        ("DualPipeV", 11.1),
    ],
)
def test_bubble_fractions_of_4_ranks_and_8_micro_batches(name: str, percent: float) -> None:
    schedule = build(name, 4, 1 if name in ("GPipe", "1F1B") else 2, 8)
    timeline = simulate(schedule, StageTimes.even(schedule, 1, 1, 1))
    assert round(100 * timeline.bubble_fraction, 1) == percent


def test_1f1b_written_out() -> None:
    rows = [[str(slot) for slot in row] for row in one_f_one_b(3, 4).rows]
    assert rows == [
        ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"],
        ["1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1B3"],
        ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"],
    ]


def test_rounds_share_out_the_left_over_micro_batches() -> None:
    """11 micro-batches on 4 ranks: rounds of 6 and 5, so chunk 1 starts after micro-batch 5, not after 3."""
    forwards = [
        slot for slot in interleaved_1f1b(4, 2, 11).rows[0] if isinstance(slot, Action) and slot.kind == "F"
    ]
    assert [action.stage for action in forwards] == [0] * 6 + [4] * 6 + [0] * 5 + [4] * 5
    assert [action.microbatch for action in forwards[:12]] == [*range(6), *range(6)]
