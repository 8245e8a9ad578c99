"""Held-out batches: the same ones in every round, the same number on every rank.

A round reads rows by number and keeps no position, so it cannot disturb the training data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from titan5d.data.dataset import IGNORE, PADDING, Dataset, MicroBatch, to_micro_batch
from titan5d.data.loader import check_batch, make_order

ORDER_SEED = 0  # fixed: rounds of runs with different seeds are comparable


class ValidationBatches:
    """Iterating yields `steps` lists of micro-batches for this rank; iterating again yields the same.

    steps > 0: that many global batches, from a fixed shuffle of the data set, so a short round samples all of it.
    steps = -1, or more than there are: every row once, in order; the last global batch is filled up with rows
    whose labels are all -100 and whose sample id is -1, so nothing is left out and no rank stops early.
    Raises DataError when the sizes do not fit or the data set has no whole row.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        local_batch_size: int,
        dp_rank: int,
        dp_size: int,
        steps: int,
    ) -> None:
        check_batch(dataset, global_batch_size, local_batch_size, dp_rank, dp_size)
        self._dataset = dataset
        self._local = local_batch_size
        whole = -(-dataset.n_samples // global_batch_size)  # batches that hold every row
        self.steps = whole if steps < 0 else min(steps, whole)
        ids = np.full(self.steps * global_batch_size, -1, dtype=np.int64)
        if self.steps == whole:
            ids[: dataset.n_samples] = np.arange(dataset.n_samples)
        else:
            ids = make_order(dataset, global_batch_size, ORDER_SEED, shuffle=True).ids(np.arange(len(ids)))
        rows_here = global_batch_size // dp_size
        self._ids = ids.reshape(self.steps, dp_size, rows_here)[:, dp_rank]  # (steps, rows of this rank)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        for ids in self._ids:
            yield [self._micro_batch(ids[i : i + self._local]) for i in range(0, len(ids), self._local)]

    def _micro_batch(self, sample_ids: npt.NDArray[np.int64]) -> MicroBatch:
        real = sample_ids >= 0
        rows = self._dataset.rows(np.where(real, sample_ids, 0))
        if real.all():
            return to_micro_batch(rows, sample_ids)
        labels = np.where(real[:, None], rows.labels, IGNORE)
        document_ids = np.where(real[:, None], rows.document_ids, np.int32(PADDING))
        filled = replace(rows, labels=labels, document_ids=document_ids, several_documents=True)
        return to_micro_batch(filled, sample_ids)
