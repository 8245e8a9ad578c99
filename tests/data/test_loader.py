"""The loader: one set of rows per step for any layout, one end for all ranks, one number as its state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.corpora import CountedRows, marked_documents, packed
from titan5d.data.blend import Blend
from titan5d.data.dataset import Dataset, batch_valid_tokens
from titan5d.data.errors import DataError
from titan5d.data.loader import DataLoader


def loader_of(
    dataset: Dataset, batch: int, local: int, rank: int = 0, size: int = 1, **options: Any
) -> DataLoader:
    options = {"seed": 0, "prefetch": 0} | options
    return DataLoader(
        dataset, global_batch_size=batch, local_batch_size=local, dp_rank=rank, dp_size=size, **options
    )


def ids_by_step(loader: DataLoader, steps: int | None = None) -> list[list[int]]:
    return [
        [i for micro_batch in micro_batches for i in micro_batch.sample_ids.tolist()]
        for micro_batches in islice(loader, steps)
    ]


def global_ids(
    dataset: Dataset, batch: int, local: int, size: int, steps: int, **options: Any
) -> list[list[int]]:
    """The rows of each step, the ranks one after the other."""
    ranks = [
        ids_by_step(loader_of(dataset, batch, local, rank, size, **options), steps) for rank in range(size)
    ]
    return [[i for rank in ranks for i in rank[step]] for step in range(steps)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_step_has_the_same_rows_for_any_layout(shuffle: bool) -> None:
    """Public case 043: rows depend on the data-parallel coordinate only, and ranks share none."""
    dataset = CountedRows(64)
    reference = global_ids(dataset, 8, 8, 1, 20, shuffle=shuffle)
    assert all(len(set(step)) == 8 for step in reference)
    for local, size in ((1, 1), (2, 2), (4, 2), (1, 8), (2, 4)):
        assert global_ids(dataset, 8, local, size, 20, shuffle=shuffle) == reference
    for epoch in range(2):  # 64 rows, batch 8: eight steps an epoch
        assert sorted(i for step in reference[8 * epoch : 8 * epoch + 8] for i in step) == list(range(64))


def test_micro_batches_hold_the_rows_they_name() -> None:
    steps = list(islice(loader_of(CountedRows(64), 8, 2, 1, 2), 3))
    for micro_batches in steps:
        assert len(micro_batches) == 2  # 8 rows / (2 a micro-batch * 2 ranks)
        for micro_batch in micro_batches:
            assert micro_batch.tokens.shape == (2, 4) and micro_batch.tokens.dtype == torch.int64
            assert (micro_batch.tokens == micro_batch.sample_ids[:, None]).all()
            assert (micro_batch.positions == torch.arange(4)).all() and micro_batch.document_ids is None


def test_valid_tokens_are_the_labels_that_count(tmp_path: Path) -> None:
    loader = loader_of(packed(tmp_path, marked_documents(100, 11), 16), 4, 2)
    for micro_batches in islice(loader, 10):
        count = sum(int((micro_batch.labels != -100).sum()) for micro_batch in micro_batches)
        assert batch_valid_tokens(micro_batches) == count < 4 * 16
        assert all(micro_batch.document_ids is not None for micro_batch in micro_batches)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_saved_at_one_degree_continued_at_another(prefetch: int) -> None:
    """Contract 5: 2 -> 4 -> 8 data-parallel ranks with restarts between equal one straight run."""
    dataset = CountedRows(100)
    straight = global_ids(dataset, 8, 8, 1, 40)
    pieced: list[list[int]] = []
    state: dict[str, Any] | None = None
    for size, steps in ((2, 7), (4, 13), (8, 20)):
        ranks = []
        for rank in range(size):
            loader = loader_of(dataset, 8, 1, rank, size, prefetch=prefetch)
            if state is not None:
                loader.resume(state)
            ranks.append(ids_by_step(loader, steps))
        pieced += [[i for rank in ranks for i in rank[step]] for step in range(steps)]
        state = loader.state()
        assert state["consumed_samples"] == 8 * len(pieced)  # what was handed out, not what was read ahead
    assert pieced == straight


def test_uneven_tail_is_trimmed_before_ranks_take_their_part() -> None:
    """Public case 045: 10 rows, micro-batch 2, 3 ranks, 3 epochs, saved after step 2."""
    dataset = CountedRows(10)
    ranks = [ids_by_step(loader_of(dataset, 6, 2, rank, 3, epochs=3)) for rank in range(3)]
    assert [len(rank) for rank in ranks] == [3, 3, 3]  # one step an epoch on every rank
    steps = [[i for rank in ranks for i in rank[step]] for step in range(3)]
    assert all(len(set(step)) == 6 for step in steps)
    first = loader_of(dataset, 6, 2, 0, 3, epochs=3)
    ids_by_step(first, 2)
    resumed = loader_of(dataset, 6, 2, 0, 3, epochs=3)
    resumed.resume(first.state())
    assert resumed.consumed_samples == 12 and resumed.steps_available == 1
    assert ids_by_step(resumed) == ranks[0][2:]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("epochs", "steps"), [(1, 8), (3, 24)])
def test_data_ends_at_the_same_step_on_every_rank_and_is_known_before(
    prefetch: int, epochs: int, steps: int
) -> None:
    """Public case 040: 17 rows over 2 ranks; nobody is left waiting."""
    for rank in range(2):
        loader = loader_of(CountedRows(17), 2, 1, rank, 2, epochs=epochs, prefetch=prefetch)
        assert loader.steps_available == steps
        assert len(ids_by_step(loader)) == steps
        assert loader.steps_available == 0 and ids_by_step(loader) == []
    assert loader_of(CountedRows(17), 2, 1, 0, 2).steps_available is None


def test_start_sample_is_where_it_starts() -> None:
    dataset = CountedRows(64)
    assert (
        ids_by_step(loader_of(dataset, 8, 8, start_sample=40), 5)
        == ids_by_step(loader_of(dataset, 8, 8), 10)[5:]
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dataset": CountedRows(63, 8)}, r"seq_len was 4, is 8"),
        ({"batch": 4}, r"global_batch_size was 8, is 4"),
        ({"seed": 5}, r"seed was 0, is 5"),
        ({"shuffle": False}, r"shuffle was True, is False"),
    ],
)
def test_state_of_another_order_is_refused_with_the_difference(changed: dict[str, Any], message: str) -> None:
    state = loader_of(CountedRows(64), 8, 2).state()
    settings = {"dataset": CountedRows(64), "batch": 8, "local": 2} | changed
    with pytest.raises(DataError, match=message):
        loader_of(**settings).resume(state)
    loader_of(CountedRows(64), 8, 4, 1, 2, prefetch=2).resume(state)  # the layout may change


def test_state_of_other_data_is_refused(tmp_path: Path) -> None:
    state = loader_of(packed(tmp_path / "a", marked_documents(20, 30), 8), 8, 2).state()
    loader_of(packed(tmp_path / "copy", marked_documents(20, 30), 8), 8, 2).resume(
        state
    )  # same data elsewhere
    with pytest.raises(DataError, match=r"cannot go on with this data: data was \w+, is \w+\. Restore"):
        loader_of(packed(tmp_path / "b", marked_documents(21, 30), 8), 8, 2).resume(state)


@pytest.mark.parametrize(
    ("batch", "local", "rank", "size", "message"),
    [
        (10, 4, 0, 2, r"global_batch_size = 10 is no multiple of .* 4 \* 2 = 8"),
        (0, 1, 0, 1, "global_batch_size = 0"),
        (8, 0, 0, 1, "local_batch_size = 0"),
        (8, 1, 2, 2, "rank 2 of 2"),
        (128, 1, 0, 1, r"64 rows of 4 tokens, one optimizer step needs global_batch_size = 128"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    batch: int, local: int, rank: int, size: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        loader_of(CountedRows(64), batch, local, rank, size)


def test_data_without_a_whole_row_is_refused_with_its_counts(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no whole row of seq_len = 512 tokens: .* 3 documents, 36 tokens, 0 rows"
    ):
        loader_of(packed(tmp_path, marked_documents(3, 10), 512), 1, 1)


def test_start_inside_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match="start_sample 5 is no multiple of global_batch_size 8"):
        loader_of(CountedRows(64), 8, 2, start_sample=5)


class Failing(CountedRows):
    def rows(self, sample_ids: np.ndarray) -> Any:
        if 13 in sample_ids:
            raise OSError("the drive is gone")
        return super().rows(sample_ids)


def test_error_while_reading_ahead_reaches_the_trainer_and_leaves_no_thread() -> None:
    loader = loader_of(Failing(64), 4, 4, shuffle=False, prefetch=2)
    batches: Iterator[Any] = iter(loader)
    assert len([next(batches) for _ in range(3)]) == 3
    with pytest.raises(OSError, match="the drive is gone"):
        next(batches)
    assert loader.consumed_samples == 12
    assert not [thread for thread in threading.enumerate() if thread.name == "titan5d data"]


def test_leaving_the_loop_early_leaves_no_thread() -> None:
    for _ in loader_of(CountedRows(64), 4, 4, prefetch=2):
        break
    assert not [thread for thread in threading.enumerate() if thread.name == "titan5d data"]


def test_a_blend_loads_like_any_other_set_and_ends_when_the_first_part_does() -> None:
    blend = Blend([CountedRows(40), CountedRows(10)], [1, 1])
    loader = loader_of(blend, 4, 2, epochs=1)
    assert loader.steps_available == 5  # 20 rows: 10 of each
    steps = ids_by_step(loader)
    assert len(steps) == 5 and all(sum(i >= 40 for i in step) == 2 for step in steps)
    assert global_ids(blend, 4, 1, 4, 30) == global_ids(blend, 4, 4, 1, 30)
    with pytest.raises(
        DataError, match=r"training\.epochs = 1 of the blend do not fill one global batch of 32"
    ):
        loader_of(blend, 32, 2, epochs=1)
