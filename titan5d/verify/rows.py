"""Made-up training rows that are hard on every cut: few and many targets, documents of any length, places of padding.

    row 0   targets 5%            row 4   none at all
    row 1   95%                   row 5   all
    row 2   one                   row 6   3%
    row 3   62%, padding at the   row 7   47%, padding
            end

A mean of means is far from the mean here, and a document seldom ends where a rank's slice does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from titan5d.data.dataset import IGNORE, PADDING, Rows

SHARES = (0.05, 0.95, 0.0, 0.62, -1.0, 1.0, 0.03, 0.47)
"""Share of a row's places that have a target, by row modulo 8; at least one, but for the negative one: none."""
DOCUMENT_ENDS = 0.1
"""Chance that a document ends at a place: ten tokens on average."""


class UnevenRows:
    """A data set (data/dataset.py) of random tokens; row n is the same for one (seed, vocab_size, seq_len)."""

    def __init__(self, n_samples: int, seq_len: int, vocab_size: int, seed: int, document_mask: bool) -> None:
        draw = np.random.default_rng(seed)
        shape = n_samples, seq_len
        self.n_samples, self.seq_len, self.max_token_id = n_samples, seq_len, vocab_size - 1
        self.description = f"{n_samples} made-up rows of {seq_len} tokens"
        self.fingerprint = f"uneven-{n_samples}-{seq_len}-{vocab_size}-{seed}-{document_mask}"
        self._tokens = draw.integers(vocab_size, size=shape, dtype=np.int64)
        self._labels = draw.integers(vocab_size, size=shape, dtype=np.int64)
        documents = np.cumsum(draw.random(shape) < DOCUMENT_ENDS, axis=1, dtype=np.int32)
        if not document_mask:
            documents[:] = 0
        for row in range(n_samples):
            share = SHARES[row % len(SHARES)]
            targets = 0 if share < 0 else max(1, round(share * seq_len))
            self._labels[row, draw.permutation(seq_len)[targets:]] = IGNORE
        documents[3::4, -(seq_len // 8) :] = PADDING
        self._labels[documents == PADDING] = IGNORE
        self._document_ids = documents
        starts = np.ones(shape, dtype=bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        index = np.broadcast_to(np.arange(seq_len), shape)
        self._positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)

    def rows(self, sample_ids: npt.NDArray[np.int64]) -> Rows:
        """See Dataset.rows."""
        document_ids = self._document_ids[sample_ids]
        return Rows(
            tokens=self._tokens[sample_ids],
            labels=self._labels[sample_ids],
            positions=self._positions[sample_ids],
            document_ids=document_ids,
            several_documents=bool((document_ids != document_ids[:, :1]).any()),
        )
