"""The rows of each optimizer step, for one data-parallel rank.

    step s takes the global indices [s*G, (s+1)*G)      G = global_batch_size, the same rows for any layout
    rank r of D takes  [s*G + r*G/D, s*G + (r+1)*G/D)   by its data-parallel coordinate only, so TP, PP and
    in micro-batches of local_batch_size rows            CP peers read the same rows

The state of the whole loader is one number, the samples consumed. A run saved at one data-parallel degree goes
on at any other with the same global batches.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch

from titan5d.data.blend import Blend, BlendOrder
from titan5d.data.dataset import Dataset, MicroBatch, to_micro_batch
from titan5d.data.errors import DataError
from titan5d.data.order import EpochOrder, Order
from titan5d.data.prefetch import read_ahead


def make_order(dataset: Dataset, global_batch_size: int, seed: int, shuffle: bool) -> Order:
    """The order in which a run visits the rows of a data set."""
    if isinstance(dataset, Blend):
        return BlendOrder(dataset, global_batch_size, seed, shuffle)
    return EpochOrder(dataset.n_samples, global_batch_size, seed, shuffle)


class DataLoader:
    """Iterating yields one list of micro-batches per optimizer step, for this rank, until the data ends.

    global_batch_size: rows per optimizer step over all ranks; a multiple of local_batch_size * dp_size.
    dp_rank, dp_size: data-parallel coordinate (replicate x shard).
    start_sample: samples consumed before; a multiple of global_batch_size.
    epochs: passes after which the data ends, on all ranks at the same step; 0 = never.
    prefetch: steps read ahead by a thread; 0 = none. pin_memory: page-locked tensors (where there is CUDA).
    wait_limit_s: longest wait for a batch before an error.

    Raises DataError when the sizes do not fit or the data set does not fill one global batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        local_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool = True,
        start_sample: int = 0,
        epochs: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        wait_limit_s: float = 600.0,
    ) -> None:
        check_batch(dataset, global_batch_size, local_batch_size, dp_rank, dp_size)
        if dataset.n_samples < global_batch_size:
            raise DataError(
                f"the data set has {dataset.n_samples} rows of {dataset.seq_len} tokens, one optimizer step needs "
                f"global_batch_size = {global_batch_size}: use more data, shorter rows (training.seq_len) or a smaller "
                f"batch. Data set: {dataset.description}"
            )
        self._dataset = dataset
        self._batch, self._local = global_batch_size, local_batch_size
        self._dp_rank, self._rows_here = dp_rank, global_batch_size // dp_size
        self._order = make_order(dataset, global_batch_size, seed, shuffle)
        self._end = self._order.samples_in(epochs) if epochs else None
        if self._end == 0:
            raise DataError(
                f"training.epochs = {epochs} of the blend do not fill one global batch of {global_batch_size} rows: "
                f"{dataset.description}"
            )
        self._prefetch, self._wait_limit_s = prefetch, wait_limit_s
        self._pin = pin_memory and torch.cuda.is_available()
        self.consumed_samples = start_sample
        self.fingerprint = (
            f"data={dataset.fingerprint} seq_len={dataset.seq_len} global_batch_size={global_batch_size} "
            f"seed={seed} shuffle={shuffle}"
        )
        if start_sample % global_batch_size:
            raise DataError(
                f"start_sample {start_sample} is no multiple of global_batch_size {global_batch_size}"
            )

    @property
    def steps_available(self) -> int | None:
        """Steps from here to the end of the data, the same on every rank; None = for ever."""
        return None if self._end is None else max(0, self._end - self.consumed_samples) // self._batch

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the samples handed out so far, and what they were taken from."""
        return {"consumed_samples": self.consumed_samples, "fingerprint": self.fingerprint}

    def resume(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken. Raises DataError when the data or its order has changed."""
        saved = state["fingerprint"]
        if saved != self.fingerprint:
            was = dict(part.split("=", 1) for part in saved.split())
            now = dict(part.split("=", 1) for part in self.fingerprint.split())
            changes = [f"{key} was {was.get(key)}, is {now[key]}" for key in now if was.get(key) != now[key]]
            raise DataError(
                f"the checkpoint cannot go on with this data: {'; '.join(changes) or saved}. Restore the setting, or "
                "start a new run from the weights alone (checkpoint.initial_load_path)"
            )
        self.consumed_samples = state["consumed_samples"]

    def __iter__(self) -> Generator[list[MicroBatch]]:
        batches = read_ahead(self._steps(self.consumed_samples), self._prefetch, self._wait_limit_s)
        try:
            for micro_batches in batches:
                self.consumed_samples += self._batch
                yield micro_batches
        finally:
            batches.close()  # ends the thread

    def _steps(self, first: int) -> Iterator[list[MicroBatch]]:
        while self._end is None or first < self._end:
            mine = first + self._dp_rank * self._rows_here + np.arange(self._rows_here)
            ids = self._order.ids(mine)
            yield [
                self._micro_batch(ids[i : i + self._local]) for i in range(0, self._rows_here, self._local)
            ]
            first += self._batch

    def _micro_batch(self, sample_ids: np.ndarray[Any, np.dtype[np.int64]]) -> MicroBatch:
        batch = to_micro_batch(self._dataset.rows(sample_ids), sample_ids)
        return batch.pin_memory() if self._pin else batch


def check_batch(
    dataset: Dataset, global_batch_size: int, local_batch_size: int, dp_rank: int, dp_size: int
) -> None:
    """Raises DataError when a global batch cannot be cut into equal micro-batches over the ranks."""
    if min(global_batch_size, local_batch_size, dp_size) < 1 or not 0 <= dp_rank < dp_size:
        raise DataError(
            f"global_batch_size = {global_batch_size}, local_batch_size = {local_batch_size}, data-parallel rank "
            f"{dp_rank} of {dp_size}: sizes start at 1 and ranks at 0"
        )
    if global_batch_size % (local_batch_size * dp_size):
        raise DataError(
            f"global_batch_size = {global_batch_size} is no multiple of local_batch_size * data-parallel ranks = "
            f"{local_batch_size} * {dp_size} = {local_batch_size * dp_size}"
        )
    if dataset.n_samples == 0:
        raise DataError(
            f"the data set has no whole row of seq_len = {dataset.seq_len} tokens: {dataset.description}"
        )
