"""Blends: exact shares with no long runs, each set with its own epochs and order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import CountedRows
from titan5d.data.blend import MAX_CYCLE, Blend, BlendOrder, cycle_counts, cycle_table
from titan5d.data.errors import DataError


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([0.7, 0.3], [7, 3]), ([1, 1], [1, 1]), ([0.1] * 10, [1] * 10), ([2, 0.5, 1.5], [4, 1, 3]), ([5], [1])],
)
def test_weights_become_the_smallest_whole_numbers(weights: list[float], counts: list[int]) -> None:
    assert cycle_counts(weights) == counts


def test_awkward_weights_are_rounded_to_a_ten_thousandth() -> None:
    weights = [np.pi, np.e, 1.0]
    counts = cycle_counts(weights)
    assert sum(counts) == MAX_CYCLE
    assert np.allclose(np.array(counts) / MAX_CYCLE, np.array(weights) / sum(weights), atol=1e-4)


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0], []])
def test_weights_that_are_not_positive_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="blend weights are positive numbers"):
        cycle_counts(weights)


def test_weight_too_small_to_get_a_row_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"blend weight 1e-09 is 1\.0e-09 of the whole; the smallest share is 0\.0001"
    ):
        cycle_counts([1.0, 1e-9])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_every_prefix_of_the_cycle_is_close_to_the_shares(counts: list[int]) -> None:
    table = cycle_table(counts)
    assert np.bincount(table, minlength=len(counts)).tolist() == counts
    given_so_far = np.cumsum(table[:, None] == np.arange(len(counts)), axis=0)
    due = np.arange(1, len(table) + 1)[:, None] * np.array(counts) / sum(counts)
    assert (given_so_far - due < 1).all()  # never a whole row ahead of the share
    assert (due - given_so_far < len(counts) - 1 + 1e-9).all() or len(counts) == 1


def test_order_of_the_sets_is_fixed_for_ever() -> None:
    """Checkpoints rely on it. At each row the set furthest behind its share, the first of equals."""
    assert cycle_table([7, 3]).tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]


def blend_of(sizes: list[int], weights: list[float]) -> Blend:
    return Blend([CountedRows(size) for size in sizes], weights)


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_set_runs_through_its_own_epochs(shuffle: bool) -> None:
    blend = blend_of([50, 7], [0.7, 0.3])
    order = BlendOrder(blend, 10, seed=3, shuffle=shuffle)
    ids = order.ids(np.arange(1000))
    first, second = ids[ids < 50], ids[ids >= 50] - 50
    assert len(first) == 700 and len(second) == 300
    for rows, size in ((first, 50), (second, 7)):
        epochs = rows[: len(rows) // size * size].reshape(-1, size)
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()
        assert shuffle == (len({tuple(epoch) for epoch in epochs.tolist()}) > 1)


def test_order_is_a_function_of_the_index_alone() -> None:
    order = BlendOrder(blend_of([50, 7, 9], [3, 2, 1]), 4, seed=0, shuffle=True)
    everything = order.ids(np.arange(500))
    picked = np.array([499, 3, 77, 250])
    assert order.ids(picked).tolist() == everything[picked].tolist()


def test_sets_of_one_size_are_shuffled_differently() -> None:
    ids = BlendOrder(blend_of([100, 100], [1, 1]), 2, seed=0, shuffle=True).ids(np.arange(200))
    assert (ids[ids < 100] != ids[ids >= 100] - 100).sum() > 80


@pytest.mark.parametrize(
    ("sizes", "weights", "epochs"),
    [([50, 7], [0.7, 0.3], 1), ([10, 10], [1, 1], 3), ([5], [1], 2), ([9, 40, 3], [1, 5, 2], 2)],
)
def test_no_row_comes_more_often_than_epochs(sizes: list[int], weights: list[float], epochs: int) -> None:
    blend = blend_of(sizes, weights)
    order = BlendOrder(blend, 1, seed=0, shuffle=True)
    n = order.samples_in(epochs)
    assert np.bincount(order.ids(np.arange(n))).max() <= epochs
    assert np.bincount(order.ids(np.arange(n + 1))).max() == epochs + 1  # and n is the last such number
    assert BlendOrder(blend, 4, seed=0, shuffle=True).samples_in(epochs) == n // 4 * 4


def test_rows_come_from_the_set_of_their_id() -> None:
    blend = blend_of([3, 5], [1, 1])
    assert blend.n_samples == 8
    assert blend.rows(np.array([7, 0, 3, 2])).tokens[:, 0].tolist() == [4, 0, 0, 2]


def test_parts_must_fit() -> None:
    with pytest.raises(DataError, match=r"row lengths \[4, 8\]"):
        Blend([CountedRows(3, 4), CountedRows(3, 8)], [1, 1])
    with pytest.raises(DataError, match="no whole row of 4 tokens"):
        Blend([CountedRows(3), CountedRows(0)], [1, 1])


def test_fingerprint_follows_parts_and_shares() -> None:
    assert blend_of([3, 5], [1, 1]).fingerprint == blend_of([3, 5], [2, 2]).fingerprint
    assert blend_of([3, 5], [1, 1]).fingerprint != blend_of([3, 5], [1, 2]).fingerprint
