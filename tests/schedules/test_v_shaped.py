"""ZBVZeroBubble and DualPipeV against their laws. Times: one micro-batch in one of a rank's two stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from titan5d.schedules.memory import peak_activations
from titan5d.schedules.simulate import StageTimes, simulate
from titan5d.schedules.table import Overlap, Schedule
from titan5d.schedules.timeline import Timeline
from titan5d.schedules.v_shaped import dualpipe_v, zbv_zero_bubble

P = (4, 8)


def of_dualpipe(p: int, m: int, f: float, b: float, w: float, overlap: float) -> Timeline:
    schedule = dualpipe_v(p, m)
    return simulate(schedule, StageTimes.even(schedule, 2 * f, 2 * b, 2 * w, overlap=overlap))


@pytest.mark.parametrize("p", P)
def test_zbv_keeps_only_its_fill(p: int) -> None:
    """(p - 1) F of one stage, that is (p - 1) F / 2 of a rank's, when F = I = W."""
    for m in (2 * p - 1, 2 * p, 3 * p + 1, 5 * p):
        schedule = zbv_zero_bubble(p, m)
        timeline = simulate(schedule, StageTimes.even(schedule, 1, 1, 1))
        assert list(timeline.idle) == pytest.approx([(p - 1) / 2] * p, abs=1e-9)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 1.0, 0.25)])
def test_dualpipe_v_without_hiding(p: int, f: float, b: float, w: float) -> None:
    """(PP/2 - 1)(F&B + B - 3W) with PP = 2p stages and F&B = F + B: exact on every rank where F = I >= W."""
    for m in (2 * p, 3 * p, 3 * p + 1, 5 * p):
        law = (p - 1) * ((f + b + w) + (b + w) - 3 * w)
        assert list(of_dualpipe(p, m, f, b, w, overlap=0).idle) == pytest.approx([law] * p, abs=1e-9)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("overlap", [0.25, 0.5, 1.0])
def test_dualpipe_v_with_hiding(p: int, overlap: float) -> None:
    """The same law with a shorter F&B, on the last rank; ranks with fewer overlapped slots wait less."""
    for m in (2 * p, 3 * p + 1):
        f_and_b = 3 - overlap * 1
        law = (p - 1) * (f_and_b + 2 - 3)
        idle = of_dualpipe(p, m, 1, 1, 1, overlap).idle
        assert idle[-1] == pytest.approx(law, abs=1e-9)
        assert max(idle) == pytest.approx(law, abs=1e-9)


@pytest.mark.parametrize("p", P)
def test_dualpipe_v_hides_most_of_a_long_run(p: int) -> None:
    """All but a fill's worth of the forwards run inside overlapped slots."""
    m = 10 * p
    for row in dualpipe_v(p, m).rows:
        assert sum(isinstance(slot, Overlap) for slot in row) >= 2 * (m - 2 * p)


def test_memory() -> None:
    for p in P:
        assert peak_activations(zbv_zero_bubble(p, 4 * p)) == (2 * p,) * p
        assert peak_activations(dualpipe_v(p, 4 * p)) == (2 * p + 1,) * p


@pytest.mark.parametrize("builder", [zbv_zero_bubble, dualpipe_v])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_fewer_micro_batches_take_less_time_and_memory(
    builder: Callable[[int, int], Schedule], p: int
) -> None:
    makespans, peaks = [], []
    for m in range(1, 3 * p + 2):
        schedule = builder(p, m)
        makespans.append(simulate(schedule, StageTimes.even(schedule, 1, 1, 1)).makespan)
        peaks.append(max(peak_activations(schedule)))
    assert makespans == sorted(makespans)
    assert peaks == sorted(peaks)
    # One micro-batch goes down and up through 2p stages and back, and at most its W are off that path.
    assert 2 * p <= makespans[0] <= 3 * p
