"""Validation: the same rows in every round, every row once with steps = -1, equal counts on all ranks."""

from __future__ import annotations

import pytest
import torch

from tests.data.corpora import CountedRows
from titan5d.data.blend import Blend
from titan5d.data.dataset import Dataset, batch_valid_tokens
from titan5d.data.errors import DataError
from titan5d.data.validation import ValidationBatches


def batches_of(
    dataset: Dataset, batch: int, local: int, rank: int, size: int, steps: int
) -> ValidationBatches:
    return ValidationBatches(
        dataset, global_batch_size=batch, local_batch_size=local, dp_rank=rank, dp_size=size, steps=steps
    )


def ids_of(batches: ValidationBatches) -> list[list[int]]:
    return [[i for micro_batch in step for i in micro_batch.sample_ids.tolist()] for step in batches]


def test_each_round_reads_the_same_batches_for_any_layout() -> None:
    """Public case 086, first part: 24 rows, 3 steps, 3 rounds, 1 or 2 ranks."""
    dataset = CountedRows(24)
    one = batches_of(dataset, 4, 4, 0, 1, steps=3)
    rounds = [ids_of(one) for _ in range(3)]
    assert rounds[0] == rounds[1] == rounds[2]
    assert one.steps == 3 and len({i for step in rounds[0] for i in step}) == 12
    two = [ids_of(batches_of(dataset, 4, 2, rank, 2, steps=3)) for rank in range(2)]
    assert [a + b for a, b in zip(*two, strict=True)] == rounds[0]


def test_whole_set_gives_every_row_once_and_every_rank_the_same_steps() -> None:
    """Public case 086, second part: steps = -1, 7 rows, 2 ranks."""
    ranks = [batches_of(CountedRows(7), 4, 2, rank, 2, steps=-1) for rank in range(2)]
    assert [batches.steps for batches in ranks] == [2, 2]
    assert [ids_of(batches) for batches in ranks] == [[[0, 1], [4, 5]], [[2, 3], [6, -1]]]
    assert [batch_valid_tokens(step) for batches in ranks for step in batches] == [8, 8, 8, 4]
    padded = list(ranks[1])[1][0]
    assert (padded.labels[1] == -100).all() and (padded.labels[0] == 6).all()
    assert padded.tokens.shape == (2, 4)
    assert padded.document_ids is not None and padded.document_ids.tolist() == [[0] * 4, [-1] * 4]


def test_rank_without_any_row_left_still_takes_part() -> None:
    batches = batches_of(CountedRows(5), 4, 1, 3, 4, steps=-1)
    assert ids_of(batches) == [[3], [-1]]
    assert batch_valid_tokens(list(batches)[1]) == 0


@pytest.mark.parametrize("steps", [6, 100])
def test_more_steps_than_there_are_is_the_whole_set(steps: int) -> None:
    batches = batches_of(CountedRows(24), 4, 4, 0, 1, steps=steps)
    assert batches.steps == 6
    assert [i for step in ids_of(batches) for i in step] == list(range(24))


def test_few_steps_sample_the_whole_set() -> None:
    ids = [i for step in ids_of(batches_of(CountedRows(1000), 10, 10, 0, 1, steps=10)) for i in step]
    assert min(ids) < 100 and max(ids) > 900


def test_a_blend_keeps_its_shares() -> None:
    blend = Blend([CountedRows(100), CountedRows(100)], [3, 1])
    ids = torch.tensor(ids_of(batches_of(blend, 4, 4, 0, 1, steps=10)))
    assert ((ids >= 100).sum(dim=1) == 1).all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="no multiple"):
        batches_of(CountedRows(24), 6, 4, 0, 1, steps=1)
    with pytest.raises(DataError, match="no whole row"):
        batches_of(CountedRows(0), 4, 4, 0, 1, steps=-1)
