"""What a data set gives the loader, and what the loader gives the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

IGNORE = -100  # label of a position that has no target
PADDING = -1  # document id of places that hold no token, where a row is filled up


@dataclass(frozen=True)
class Rows:
    """B training rows of S tokens, as numpy arrays of shape (B, S).

    tokens, labels, positions: int64. labels[b, i] is the target of tokens[b, i], -100 = none. positions restart
    at each document. document_ids: int32, 0, 1, 2, ... along a row, -1 = padding. several_documents: whether any
    row holds more than one; if none does, attention needs no document mask.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32]
    several_documents: bool


class Dataset(Protocol):
    """A fixed number of rows, each readable by its number."""

    description: str
    """One line for people."""
    seq_len: int
    """S."""
    n_samples: int
    """Rows; their ids are 0..n_samples-1."""
    fingerprint: str
    """Changes when any row changes."""
    max_token_id: int
    """Highest id among tokens and labels; the model needs a larger vocabulary."""

    def rows(self, sample_ids: npt.NDArray[np.int64]) -> Rows:
        """The rows with these ids, in this order."""
        ...


@dataclass
class MicroBatch:
    """One forward and backward on one data-parallel rank: CPU tensors, B = local_batch_size.

    tokens, labels, positions: (B, S) int64. document_ids: (B, S) int32, or None when every row is one document.
    sample_ids: (B,) int64, the ids of the rows in the data set; -1 marks a row of padding (validation only).
    valid_tokens: labels that are not -100.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    document_ids: torch.Tensor | None
    sample_ids: torch.Tensor
    valid_tokens: int

    def pin_memory(self) -> MicroBatch:
        """The same in page-locked memory."""
        ids = self.document_ids
        return MicroBatch(
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            positions=self.positions.pin_memory(),
            document_ids=None if ids is None else ids.pin_memory(),
            sample_ids=self.sample_ids,
            valid_tokens=self.valid_tokens,
        )


def batch_valid_tokens(micro_batches: list[MicroBatch]) -> int:
    """Targets of one optimizer step on this rank; summed over DP x CP ranks it is the divisor of the loss."""
    return sum(batch.valid_tokens for batch in micro_batches)


def to_micro_batch(rows: Rows, sample_ids: npt.NDArray[np.int64]) -> MicroBatch:
    """Tensors over the rows' own memory."""
    return MicroBatch(
        tokens=torch.from_numpy(rows.tokens),
        labels=torch.from_numpy(rows.labels),
        positions=torch.from_numpy(rows.positions),
        document_ids=torch.from_numpy(rows.document_ids) if rows.several_documents else None,
        sample_ids=torch.from_numpy(sample_ids),
        valid_tokens=int(np.count_nonzero(rows.labels != IGNORE)),
    )
