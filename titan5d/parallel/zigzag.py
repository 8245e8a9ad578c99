"""How a row of tokens is cut along the sequence over the ranks of context parallelism.

Axis sliced: sequence. Collectives: none here, the cut is made before the model and nothing is gathered back.

A causal query at position p meets p + 1 keys, so equal contiguous pieces are unequal work: of 4 ranks the last
does 7 times what the first does, and everybody waits for it. Cut into 2N chunks, give rank i a cheap one from
the head and the matching dear one from the tail, i and 2N-1-i, and all ranks have the same:

    headtail (zig-zag), N = 4                       none (contiguous), N = 4
    chunk   0   1   2   3   4   5   6   7           chunk     0       1       2       3
    rank    0   1   2   3   3   2   1   0           rank      0       1       2       3
    pairs   1 + 15  =  3 + 13  =  5 + 11  = 7 + 9   pairs     1       3       5       7

Every rank keeps its chunks in the order of their positions, so "earlier in my piece" means "earlier in the row"
and a rank's queries against its own keys are an ordinary causal triangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LoadBalancer = Literal["headtail", "none"]


@dataclass(frozen=True)
class SequenceCut:
    """The cutting rule for `degree` ranks: which positions of a row each of them holds."""

    degree: int
    load_balancer: LoadBalancer = "headtail"

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ValueError(f"context_parallel_degree = {self.degree}: a degree is 1 or more")
        if self.load_balancer not in ("headtail", "none"):
            raise ValueError(
                f"context_parallel_load_balancer = {self.load_balancer!r} is not known; use 'headtail' (zig-zag,"
                " equal work for causal attention) or 'none' (contiguous pieces)"
            )

    @property
    def zigzag(self) -> bool:
        """Whether a rank holds two chunks. One rank holds everything, whatever the rule."""
        return self.load_balancer == "headtail" and self.degree > 1

    @property
    def n_chunks(self) -> int:
        return 2 * self.degree if self.zigzag else self.degree

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks rank holds, in the order of their positions."""
        return (rank, self.n_chunks - 1 - rank) if self.zigzag else (rank,)

    def chunk_len(self, seq_len: int) -> int:
        """Tokens in one chunk. Raises ValueError if the row does not divide."""
        if seq_len % self.n_chunks:
            below = seq_len // self.n_chunks * self.n_chunks
            pieces = f"2 x {self.degree} chunks (headtail)" if self.zigzag else f"{self.degree} pieces"
            raise ValueError(
                f"training.seq_len = {seq_len} cannot be cut into {pieces} of equal length for"
                f" context_parallel_degree = {self.degree}; use a multiple of {self.n_chunks}, such as"
                f" {below or self.n_chunks} or {below + self.n_chunks}"
            )
        return seq_len // self.n_chunks

    def positions(self, rank: int, seq_len: int, device: torch.device | str | None = None) -> Tensor:
        """The positions rank holds, ascending. (seq_len / degree,) int64."""
        length = self.chunk_len(seq_len)
        starts = [chunk * length for chunk in self.chunks_of(rank)]
        return torch.cat([torch.arange(start, start + length, device=device) for start in starts])

    def shard(self, row: Tensor, rank: int, dim: int = 1) -> Tensor:
        """What rank keeps of `row`: (B, S, ...) -> (B, S / degree, ...), a contiguous copy.

        The same call cuts tokens, labels, positions and document ids: they are made for the whole row first
        (labels shifted, positions counted), because after the cut a neighbour in memory is no neighbour in text.
        """
        length = self.chunk_len(row.shape[dim])
        return torch.cat([row.narrow(dim, chunk * length, length) for chunk in self.chunks_of(rank)], dim)

    def unshard(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The inverse of `shard`: the pieces of ranks 0..degree-1, each (B, S / degree, ...) -> (B, S, ...)."""
        if len(shards) != self.degree:
            raise ValueError(f"{len(shards)} pieces were given for context_parallel_degree = {self.degree}")
        held = len(self.chunks_of(0))
        pieces = [
            (chunk, piece)
            for rank, shard in enumerate(shards)
            for chunk, piece in zip(self.chunks_of(rank), shard.chunk(held, dim), strict=True)
        ]
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)

    def local_index(self, rank: int, position: Tensor, seq_len: int) -> Tensor:
        """How many positions rank holds below `position`, i.e. where `position` falls in its piece.

        An interval [a, b) of the row is therefore [local_index(a), local_index(b)) of the piece (perhaps empty).
        """
        length = self.chunk_len(seq_len)
        below = [(position - chunk * length).clamp(0, length) for chunk in self.chunks_of(rank)]
        return torch.stack(below).sum(0)


def live_pairs(
    cut: SequenceCut, q_rank: int, kv_rank: int, seq_len: int, document_ids: Tensor | None = None
) -> int:
    """Query-key pairs that attention does not mask between q of one rank and k of another, summed over rows.

    Ring step s of rank i is `live_pairs(cut, i, (i - s) % degree, ...)`. Counted position by position from the
    definition (key not after query, same document), so it can stand as a proof beside the kernels' own plan.

    Args:
        document_ids: (B, S) of the whole rows in natural order, or None for one row that is one document.
    """
    positions = cut.positions(q_rank, seq_len)
    if document_ids is None:
        starts = torch.zeros(1, seq_len, dtype=torch.int64)
    else:
        starts = document_starts(document_ids)
    begin = cut.local_index(kv_rank, starts[:, positions], seq_len)  # (B, S / degree)
    end = cut.local_index(kv_rank, positions + 1, seq_len)  # (S / degree,)
    return int((end - begin).clamp(min=0).sum())


def document_starts(document_ids: Tensor) -> Tensor:
    """For each position the position at which its document begins: (B, S) -> (B, S) int64 on the CPU."""
    ids = document_ids.cpu()
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return torch.where(begins, positions, 0).cummax(1).values
