"""Several data sets mixed by weight, with exact shares and no random draws.

Weights become whole numbers a_k of a cycle of L rows (0.7 and 0.3: 7 and 3 of 10). Inside the cycle the next row
comes from the set that is furthest behind its share:

    shares 7:3   A B A A A B A A B A | A B A ...

So which set gives row g, and how many rows it gave before, follow from g by one table look-up. Each set has its
own epochs and its own order; a small set comes round again as often as its share asks for.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from titan5d.data.dataset import Dataset, Rows
from titan5d.data.errors import DataError
from titan5d.data.order import permute_epochs

Ints = npt.NDArray[np.int64]
MAX_CYCLE = 10_000  # shares are exact to 1 / MAX_CYCLE at worst


class Blend:
    """Data sets side by side: the rows of set k have the ids `offsets[k] + row`."""

    def __init__(self, datasets: list[Dataset], weights: list[float]) -> None:
        seq_lens = {dataset.seq_len for dataset in datasets}
        if len(seq_lens) != 1 or len(datasets) != len(weights):
            raise DataError(
                f"a blend needs one weight per data set and one row length, got {len(datasets)} data sets, "
                f"{len(weights)} weights and row lengths {sorted(seq_lens)}"
            )
        for dataset in datasets:
            if dataset.n_samples == 0:
                raise DataError(
                    f"a part of the blend has no whole row of {dataset.seq_len} tokens: {dataset.description}"
                )
        self.datasets = datasets
        self.counts = cycle_counts(weights)
        self.offsets = np.cumsum([0] + [dataset.n_samples for dataset in datasets])
        self.seq_len = datasets[0].seq_len
        self.n_samples = int(self.offsets[-1])
        self.max_token_id = max(dataset.max_token_id for dataset in datasets)
        parts = [
            f"{dataset.fingerprint}*{count}" for dataset, count in zip(datasets, self.counts, strict=True)
        ]
        self.fingerprint = hashlib.sha256("+".join(parts).encode()).hexdigest()[:16]
        total = sum(self.counts)
        shares = [
            f"{count / total:.2%} {dataset.description}"
            for dataset, count in zip(datasets, self.counts, strict=True)
        ]
        self.description = "a blend of " + "; ".join(shares)

    def rows(self, sample_ids: Ints) -> Rows:
        """See Dataset.rows."""
        n, s = len(sample_ids), self.seq_len
        tokens, labels, positions = np.empty((3, n, s), np.int64)
        document_ids = np.empty((n, s), np.int32)
        several = False
        source = np.searchsorted(self.offsets, sample_ids, side="right") - 1
        for k in np.unique(source).tolist():
            here = np.flatnonzero(source == k)
            part = self.datasets[k].rows(sample_ids[here] - self.offsets[k])
            tokens[here], labels[here], positions[here] = part.tokens, part.labels, part.positions
            document_ids[here] = part.document_ids
            several |= part.several_documents
        return Rows(tokens, labels, positions, document_ids, several)


class BlendOrder:
    """The order of a blend. One epoch ends, at a whole global batch, where the first set has been seen once.

    So with epochs = E no row is trained on more than E times.
    """

    def __init__(self, blend: Blend, global_batch_size: int, seed: int, shuffle: bool) -> None:
        self._sizes = [dataset.n_samples for dataset in blend.datasets]
        self._offsets, self._counts = blend.offsets, blend.counts
        self._batch, self._seed, self._shuffle = global_batch_size, seed, shuffle
        self._table = cycle_table(blend.counts)  # (L,) which set gives each row of a cycle
        self._rank = np.zeros(len(self._table), np.int64)  # (L,) rows that set gave before in this cycle
        for k, count in enumerate(blend.counts):
            self._rank[self._table == k] = np.arange(count)

    def ids(self, global_indices: Ints) -> Ints:
        cycles, places = np.divmod(global_indices, len(self._table))
        source = self._table[places]
        drawn = cycles * np.array(self._counts)[source] + self._rank[places]  # rows that set gave before
        out = np.empty_like(global_indices)
        for k, size in enumerate(self._sizes):
            here = source == k
            epochs, rows = np.divmod(drawn[here], size)
            # Two sets of one size must not be shuffled alike, hence the stream k + 1.
            out[here] = permute_epochs(rows, epochs, size, self._seed, k + 1) if self._shuffle else rows
        return out + self._offsets[source]

    def samples_in(self, epochs: int) -> int:
        ends = []
        for k, (size, count) in enumerate(zip(self._sizes, self._counts, strict=True)):
            cycle, rank = divmod(size * epochs, count)
            place = int(np.flatnonzero(self._table == k)[rank])
            ends.append(cycle * len(self._table) + place)  # the first index that needs a row once too often
        return min(ends) // self._batch * self._batch


def cycle_counts(weights: list[float]) -> list[int]:
    """Whole numbers in the ratio of the weights, summing to at most 10,000.

    Weights are read as the decimals they are written as, so 0.1 is one tenth. Where the exact ratio needs a longer
    cycle, the counts are rounded to sum 10,000 (largest remainders). Raises DataError for a weight that is not
    positive or so small that it would get nothing.
    """
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise DataError(f"blend weights are positive numbers, got {weights}")
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    cycle = int(np.lcm.reduce([share.denominator for share in shares], dtype=object))
    if cycle <= MAX_CYCLE:
        return [int(share * cycle) for share in shares]
    counts = [int(share * MAX_CYCLE) for share in shares]
    remainders = [share * MAX_CYCLE - count for share, count in zip(shares, counts, strict=True)]
    for k in sorted(range(len(counts)), key=lambda k: -remainders[k])[: MAX_CYCLE - sum(counts)]:
        counts[k] += 1
    if 0 in counts:
        k = counts.index(0)
        raise DataError(
            f"blend weight {weights[k]} is {float(shares[k]):.1e} of the whole; the smallest share is {1 / MAX_CYCLE}"
        )
    return counts


def cycle_table(counts: list[int]) -> Ints:
    """(L,) the set that gives each row of a cycle, always the one furthest behind its share.

    Set k is chosen only while it has fewer than its share of the rows so far, so no count is passed and, as the
    counts sum to L, each is met exactly at the end of the cycle.
    """
    wanted = np.array(counts, dtype=np.int64)
    length = int(wanted.sum())
    given = np.zeros_like(wanted)
    table = np.empty(length, dtype=np.int64)
    for row in range(length):
        k = int(np.argmax(wanted * (row + 1) - given * length))
        table[row] = k
        given[k] += 1
    return table
