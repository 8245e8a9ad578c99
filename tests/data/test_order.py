"""The order: a bijection for every size, different per seed and epoch, and as even as chance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan5d.data.order import EpochOrder, permute


def whole(n: int, seed: int, epoch: int = 0, stream: int = 0) -> np.ndarray:
    return permute(np.arange(n), n, seed, epoch, stream)


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
def test_every_row_comes_exactly_once(n: int, seed: int, epoch: int) -> None:
    assert (np.sort(whole(n, seed, epoch)) == np.arange(n)).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 2**12 - 1, 2**12, 2**12 + 1, 99_991])
def test_every_row_comes_exactly_once_at_the_edges(n: int) -> None:
    assert (np.sort(whole(n, 7)) == np.arange(n)).all()


def test_places_are_independent_of_how_they_are_asked() -> None:
    order = whole(1000, 3)
    assert permute(np.array([999, 0, 500]), 1000, 3, 0).tolist() == order[[999, 0, 500]].tolist()


def test_a_million_million_rows_need_no_memory() -> None:
    n = 10**12
    places = np.arange(n - 50_000, n)
    rows = permute(places, n, 1, 0)
    assert len(np.unique(rows)) == len(rows) and rows.min() >= 0 and rows.max() < n
    assert chi_square(np.bincount(rows * 20 // n, minlength=20)) < 43.8  # 19 degrees of freedom, p = 0.001


def test_seed_epoch_and_stream_each_change_the_order() -> None:
    n = 10_000
    orders = [whole(n, 0), whole(n, 1), whole(n, 0, epoch=1), whole(n, 0, stream=1), whole(n, 1, epoch=1)]
    for i, a in enumerate(orders):
        for b in orders[i + 1 :]:
            assert (a == b).sum() < 12  # one is expected between independent orders; 12 has p < 1e-9


def test_order_is_fixed_for_ever() -> None:
    """Checkpoints rely on it: these numbers must never change."""
    assert whole(10, 0).tolist() == [9, 1, 6, 0, 4, 7, 5, 3, 8, 2]
    assert permute(np.array([0, 1, 10**12 - 1]), 10**12, 42, 3).tolist() == [
        21324607338,
        644946881831,
        473693708770,
    ]


@pytest.mark.parametrize("n", [4, 5, 8, 10, 16])
def test_each_row_is_as_likely_at_each_place(n: int) -> None:
    trials = 1500
    counts = np.zeros((n, n))
    for seed in range(trials):
        counts[np.arange(n), whole(n, seed)] += 1
    freedom = (n - 1) ** 2
    assert chi_square(counts) * (n - 1) / n < freedom + 4.5 * np.sqrt(2 * freedom)


def test_fixed_points_and_neighbours_are_as_rare_as_in_random_orders() -> None:
    """A random permutation has one fixed point and 2 (n-1)/n neighbour pairs on average, each Poisson."""
    n, trials = 1000, 1000
    fixed = neighbours = 0
    for seed in range(trials):
        order = whole(n, seed)
        fixed += int((order == np.arange(n)).sum())
        neighbours += int((np.abs(np.diff(order)) == 1).sum())
    assert abs(fixed / trials - 1) < 4.5 / np.sqrt(trials)
    assert abs(neighbours / trials - 2) < 4.5 * np.sqrt(2 / trials)


def test_place_and_row_are_uncorrelated() -> None:
    n = 100_000
    for seed in range(5):
        correlation = np.corrcoef(np.arange(n), whole(n, seed))[0, 1]
        assert abs(correlation) < 4.5 / np.sqrt(n)


def test_epochs_are_trimmed_to_whole_global_batches() -> None:
    order = EpochOrder(10, 4, seed=0, shuffle=True)
    assert order.samples_in(3) == 24
    ids = order.ids(np.arange(24)).reshape(3, 8)
    for epoch, row in enumerate(ids):
        assert len(set(row.tolist())) == 8
        assert (row == whole(10, 0, epoch)[:8]).all()
    assert len({tuple(sorted(row)) for row in ids.tolist()}) > 1  # what is left out changes with the epoch


def test_without_shuffle_rows_come_in_order() -> None:
    order = EpochOrder(10, 4, seed=0, shuffle=False)
    assert order.ids(np.arange(16)).tolist() == [*range(8), *range(8)]
