"""Which row comes when: a pure function of (seed, epoch, global sample index).

    global index g     0 1 2 3 ...                      one number counts the samples of the whole run
    epoch, place       g // per_epoch, g % per_epoch    per_epoch = rows, trimmed to whole global batches
    row                permutation(seed, epoch)(place)

The permutation is computed for the asked places only, never stored: a Feistel network (Luby and Rackoff 1988)
over the next power of two, walked until it lands below n (cycle walking, Black and Rogaway 2002). So a run of
10^12 rows needs no memory, and any rank can start anywhere.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
HALF_ROUNDS = 16
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd


class Order(Protocol):
    """Row ids by global sample index."""

    def ids(self, global_indices: Ints) -> Ints:
        """The row ids at these global indices (any shape (N,), any order)."""
        ...

    def samples_in(self, epochs: int) -> int:
        """Samples of `epochs` passes; a multiple of the global batch."""
        ...


class EpochOrder:
    """Each epoch visits `n_samples` rows once, in an order of its own, less what fills no whole global batch.

    Trimming the shared order, before ranks take their parts, lets every rank change epoch at the same step.
    """

    def __init__(self, n_samples: int, global_batch_size: int, seed: int, shuffle: bool) -> None:
        self._n = n_samples
        self._per_epoch = n_samples - n_samples % global_batch_size
        self._seed, self._shuffle = seed, shuffle

    def ids(self, global_indices: Ints) -> Ints:
        epochs, places = np.divmod(global_indices, self._per_epoch)
        return permute_epochs(places, epochs, self._n, self._seed, 0) if self._shuffle else places

    def samples_in(self, epochs: int) -> int:
        return epochs * self._per_epoch


def permute_epochs(places: Ints, epochs: Ints, n: int, seed: int, stream: int) -> Ints:
    """`permute` where each place has its own epoch."""
    out = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        out[here] = permute(places[here], n, seed, epoch, stream)
    return out


def permute(places: Ints, n: int, seed: int, epoch: int, stream: int = 0) -> Ints:
    """The images of `places` (each in 0..n-1) under the permutation of 0..n-1 that (seed, epoch, stream) names."""
    bits = max(2, (n - 1).bit_length())
    keys = _keys(seed, epoch, stream)
    words = _feistel(places.astype(np.uint64), bits, keys)
    outside = words >= np.uint64(n)
    while outside.any():  # at most half of the domain is outside, so this ends after a few rounds
        words[outside] = _feistel(words[outside], bits, keys)
        outside = words >= np.uint64(n)
    return words.astype(np.int64)


def _feistel(words: Words, bits: int, keys: Words) -> Words:
    """A bijection of 0..2^bits-1. Each half-round xors one half with a hash of the other, which can be undone."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = words >> low_bits, words & low_mask
    for key in keys.reshape(-1, 2):
        high = high ^ (_mix(low + key[0]) & high_mask)
        low = low ^ (_mix(high + key[1]) & low_mask)
    return (high << low_bits) | low


def _keys(seed: int, epoch: int, stream: int) -> Words:
    """One 64-bit key per half-round."""
    state = np.zeros(1, np.uint64)
    for number in (seed, epoch, stream):
        state = _mix(state + GOLDEN + np.array([number % (1 << 64)], np.uint64))
    return _mix(state + GOLDEN * np.arange(1, HALF_ROUNDS + 1, dtype=np.uint64))


def _mix(x: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
