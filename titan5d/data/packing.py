"""Contiguous packing: the token stream of a set of shards cut into rows of S tokens.

    documents   |B a a a E|B b b b b b b b b b b E|B c E|        B, E: BOS, EOS
    rows (S=8)  |B a a a E B b b|b b b b b b b b|E B c E  dropped and counted
    documents    0 0 0 0 0 1 1 1|0 0 0 0 0 0 0 0|
    positions    0 1 2 3 4 0 1 2|0 1 2 3 4 5 6 7|
    labels       a a a E . b b b|b b b b b b b E|                . = -100

Every token is used once. The target of a token is the next token of the same document (of the next row, for the
last token of a row); the last token of a document has none. A document longer than a row goes on in the next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from titan5d.data.dataset import IGNORE, Rows
from titan5d.data.shards import TokenShards


class PackedShards:
    """The rows of a set of token shards; row i holds tokens [i*S, (i+1)*S) of the stream.

    With `document_mask` False the rows count as one document each: positions 0..S-1 and no second document id;
    the labels are the same, so nothing is trained to guess the next document.
    dropped_tokens: the end of the stream that fills no row.
    """

    def __init__(self, shards: TokenShards, seq_len: int, document_mask: bool = True) -> None:
        self._shards = shards
        self._document_mask = document_mask
        self.seq_len = seq_len
        self.n_samples = shards.n_tokens // seq_len
        self.dropped_tokens = shards.n_tokens % seq_len
        self.fingerprint = shards.fingerprint
        self.max_token_id = shards.max_token_id
        self.description = (
            f"{shards.meta['source']['description']}: {shards.n_documents:,} documents, {shards.n_tokens:,} tokens, "
            f"{self.n_samples:,} rows of {seq_len} ({self.dropped_tokens} tokens at the end fill no row)"
        )

    def rows(self, sample_ids: npt.NDArray[np.int64]) -> Rows:
        """See Dataset.rows."""
        n, s = len(sample_ids), self.seq_len
        stream = np.empty((n, s + 1), dtype=np.int64)  # (B, S + 1): one token ahead for the last target
        starts_here = np.zeros((n, s + 1), dtype=bool)  # a document starts at this token
        for row, sample in enumerate(sample_ids.tolist()):
            first = sample * s
            ahead = min(first + s + 1, self._shards.n_tokens)  # the last row may have no token ahead
            self._shards.read_into(stream[row, : ahead - first], first)
            starts_here[row, self._shards.document_starts(first, ahead) - first] = True
            if ahead == self._shards.n_tokens:
                starts_here[row, ahead - first :] = True  # what would come is another document
        labels = np.where(starts_here[:, 1:], IGNORE, stream[:, 1:])  # (B, S)
        tokens = np.ascontiguousarray(stream[:, :s])  # (B, S)
        inner = starts_here[:, :s]
        inner[:, 0] = False  # each row opens its own document 0
        several = self._document_mask and bool(inner.any())
        places = np.arange(s)
        if several:
            document_ids = np.cumsum(inner, axis=1, dtype=np.int32)
            positions = places - np.maximum.accumulate(np.where(inner, places, 0), axis=1)
        else:
            document_ids = np.zeros((n, s), dtype=np.int32)
            positions = np.broadcast_to(places, (n, s)).copy()
        return Rows(tokens, labels, positions, document_ids, several)
