from __future__ import annotations

import pytest

from titan5d.schedules import catalog, memory
from titan5d.schedules.table import Action, Schedule


def test_1f1b_holds_p_minus_r_whatever_m_is() -> None:
    for m in (4, 8, 100):
        assert memory.peak_activations(catalog.build("1F1B", 4, 1, m)) == (4, 3, 2, 1)


def test_gpipe_holds_all() -> None:
    assert memory.peak_activations(catalog.build("GPipe", 4, 1, 9)) == (9, 9, 9, 9)


def test_interleaved_holds_more_and_zero_bubble_levels_it() -> None:
    """p = 4, v = 2: pv + p - 1 = 11 chunks on rank 0, that is 5.5 micro-batches against 1F1B's 4."""
    interleaved = catalog.build("Interleaved1F1B", 4, 2, 8)
    assert memory.peak_activations(interleaved) == (11, 9, 7, 5)
    assert memory.peak_microbatches(interleaved) == (5.5, 4.5, 3.5, 2.5)
    zero_bubble = catalog.build("InterleavedZeroBubble", 4, 2, 8)
    assert memory.peak_activations(zero_bubble) == (8, 8, 8, 8)
    assert memory.peak_before_input_grad(zero_bubble) == (8, 7, 6, 5)
    assert memory.peak_kept_weight_grads(zero_bubble) == (1, 2, 3, 4)


def test_peak_memory_by_hand() -> None:
    """F0 F1 I0 I1 W0 W1 in one stage: 10 + 10, then I0 leaves 4 of its 10, then I1 4 of its own."""
    row = tuple(Action(0, kind, mb) for kind in ("F", "I", "W") for mb in (0, 1))
    schedule = Schedule("x", 2, (0,), (row,))
    assert memory.peak_memory(schedule, [10], [4]) == (20,)
    assert memory.peak_memory(schedule, [10], [12]) == (24,)  # what is kept may be more than what it replaces
    late = Schedule("x", 2, (0,), ((row[0], row[2], row[1], row[3], row[4], row[5]),))  # F0 I0 F1 I1 W0 W1
    assert memory.peak_memory(late, [10], [4]) == (14,)
    assert memory.peak_activations(late) == (2,)
    assert memory.peak_before_input_grad(late) == (1,)


def test_stages_of_different_size() -> None:
    schedule = catalog.build("ZBVZeroBubble", 2, 2, 1)
    assert memory.peak_memory(schedule, [1, 2, 3, 4], [0, 0, 0, 0]) == (5, 5)
    with pytest.raises(ValueError, match="activation has 2 sizes, but the schedule has 4 stages"):
        memory.peak_memory(schedule, [1, 2], [0, 0, 0, 0])


def test_validation_keeps_nothing() -> None:
    assert memory.peak_activations(catalog.build("1F1B", 2, 1, 4).forwards()) == (0, 0)
