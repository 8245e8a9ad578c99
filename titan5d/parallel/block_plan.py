"""Which part of a K/V block each rank's queries meet, and how far that block has to travel.

The ring has c steps; at step s rank i holds the K/V of rank j = (i - s) mod c. For zig-zag pieces, chunk i in
front and chunk 2c-1-i behind, causality leaves one rectangle or one triangle (front | behind):

    j == i   own block        j < i   all queries x      j > i   behind queries x
             k: f   b                 k: f   b                   k: f   b
        q f  [ \\      ]           q f  [ #     ]             q f  [       ]
        q b  [ # \\    ]           q b  [ #     ]             q b  [ #   # ]

Documents cut these further. A document is an interval of the row, hence an interval of every piece, hence again
one rectangle (or triangle) inside the block: no mask is ever made, only live pairs are computed, and a query
that meets no key in a block is simply not part of it (a fully masked row would come back from the kernels with a
log-sum-exp that poisons the merge).

All ranks know the document ids of the whole rows, so all agree, without a word, on which blocks travel how far.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from titan5d.parallel.zigzag import SequenceCut


@dataclass(frozen=True)
class RowRange:
    """The tokens start..stop of every row of a (B, L, ...) tensor."""

    start: int
    stop: int

    def take(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (B, stop - start, ...), a view."""
        return x[:, self.start : self.stop]

    def give_back(self, x: Tensor, taken: Tensor) -> None:
        """Returns to x what was taken from it and changed in place: a view, so it is there already."""

    def add(self, x: Tensor, value: Tensor) -> None:
        x[:, self.start : self.stop] += value


@dataclass(frozen=True)
class RowList:
    """Listed tokens of a contiguous (B, L, ...) tensor, packed behind each other as one row."""

    index: Tensor
    """(T,) int64, ascending: b * L + l, on the device of the tensors."""

    def take(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (1, T, ...), a copy."""
        return x.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def give_back(self, x: Tensor, taken: Tensor) -> None:
        """Returns to x what was taken from it and changed in place."""
        x.view(-1, *x.shape[2:]).index_copy_(0, self.index, taken[0])

    def add(self, x: Tensor, value: Tensor) -> None:
        x.view(-1, *x.shape[2:]).index_add_(0, self.index, value[0].to(x.dtype))


@dataclass(frozen=True)
class AllRows:
    """All tokens of a contiguous (B, L, ...) tensor, as one row: what RowList is when every token is listed."""

    def take(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (1, B * L, ...), a view."""
        return x.flatten(0, 1).unsqueeze(0)

    def give_back(self, x: Tensor, taken: Tensor) -> None:
        """Returns to x what was taken from it and changed in place: a view, so it is there already."""

    def add(self, x: Tensor, value: Tensor) -> None:
        x += value.view(x.shape)


Rows = RowRange | RowList | AllRows


@dataclass(frozen=True)
class Spans:
    """Where the documents of a packed block begin and end: document n is q[q[n]:q[n+1]] against k[k[n]:k[n+1]]."""

    q: list[int]
    k: list[int]


@dataclass(frozen=True)
class Block:
    """The live part of one rank's queries against one K/V block. Every query in it meets at least one key."""

    q: Rows
    k: Rows
    causal: bool
    """Query l meets keys 0..l (of its document). Only with as many queries as keys. False: it meets all."""
    spans: Spans | None
    """None: a dense (B, Lq) x (B, Lk) block. Else documents packed into one row."""


@dataclass(frozen=True)
class RingPlan:
    """What one rank computes at each ring step and how the K/V blocks of all ranks move."""

    rank: int
    degree: int
    blocks: tuple[Block | None, ...]
    """By ring step: what to compute with the K/V of rank (rank - step) % degree. None: no live pair."""
    hops: tuple[int, ...]
    """By rank: how many neighbours further its K/V goes, to the last rank that has a live pair with it."""

    def owner(self, step: int) -> int:
        """Whose K/V this rank holds at `step`."""
        return (self.rank - step) % self.degree

    def is_here(self, step: int) -> bool:
        """Whether the K/V of `owner(step)` comes as far as this rank, `step` places after its owner."""
        return step <= self.hops[self.owner(step)]

    def goes_on(self, step: int) -> bool:
        """Whether the K/V this rank holds at `step` goes on to the next rank."""
        return step < self.hops[self.owner(step)]

    def goes_on_before(self, step: int) -> bool:
        """Whether the K/V the *previous* rank holds at `step` goes on to this one, which has it at step + 1."""
        return step + 1 < self.degree and self.is_here(step + 1)


def prepare_documents(document_ids: Tensor | None) -> Tensor | None:
    """Document ids as the attention modules here want their `mask`: whole rows (B, S) int32, on the host.

    Call it once per forward with the *uncut* ids. The plan decides who sends what to whom, which the host must
    know; ids on an accelerator are copied back here once rather than once per layer. None (every row is one
    document) stays None.

    Raises ValueError if an id comes back after another document began: a document is one run of equal ids.
    """
    if document_ids is None:
        return None
    ids = document_ids.to("cpu", torch.int32).contiguous()
    changes = (ids[:, 1:] != ids[:, :-1]).sum(1) + 1  # (B,) runs of equal ids in each row
    for row, runs in enumerate(changes.tolist()):
        if ids[row].unique().numel() != runs:
            kinds = ids[row].unique().numel()
            raise ValueError(
                f"document_ids: row {row} has {runs} runs of equal ids but only {kinds} different ids; a document"
                " must be one run, so give each document of a row its own id"
            )
    return ids


def plan_ring(
    cut: SequenceCut,
    rank: int,
    batch: int,
    local_len: int,
    documents: Tensor | None,
    device: torch.device | str = "cpu",
) -> RingPlan:
    """The plan of `rank`.

    Args:
        batch, local_len: the rows and the tokens per row this rank holds.
        documents: (B, local_len * degree) int32 on the host from `prepare_documents`, or None.
        device: where the index tensors shall live.

    Raises ValueError if the documents are not those of the whole rows, or the rows cannot be cut.
    """
    seq_len = local_len * cut.degree
    if documents is not None and documents.shape != (batch, seq_len):
        raise ValueError(
            f"document ids have shape {tuple(documents.shape)}, but {batch} rows of {local_len} tokens on each of"
            f" {cut.degree} context-parallel ranks need ({batch}, {seq_len}): the ids of the whole rows, uncut"
        )
    if documents is not None and (documents.dtype != torch.int32 or documents.device.type != "cpu"):
        raise ValueError(
            f"document ids are {documents.dtype} on {documents.device}; int32 on the CPU is needed to plan who sends"
            " what to whom (prepare_documents makes them so)"
        )
    cut.chunk_len(seq_len)
    ids = None if documents is None else documents.numpy().tobytes()
    return _plan(cut, rank, batch, local_len, ids, torch.device(device))


# All layers, forward, backward and recomputation of a micro-batch ask for the same plan; a pipeline has several
# micro-batches in flight.
@lru_cache(maxsize=32)
def _plan(
    cut: SequenceCut, rank: int, batch: int, local_len: int, ids: bytes | None, device: torch.device
) -> RingPlan:
    seq_len = local_len * cut.degree
    bounds = None
    if ids is not None:
        bounds = _document_bounds(torch.frombuffer(bytearray(ids), dtype=torch.int32).view(batch, seq_len))
    if bounds is not None and len(bounds[0]) == batch:
        bounds = None  # every row is one document: the dense path
    blocks: list[Block | None] = []
    for step in range(cut.degree):
        owner = (rank - step) % cut.degree
        region = _region(cut, rank, owner, local_len)
        if region is None:
            blocks.append(None)
        elif bounds is None:
            blocks.append(Block(*region, causal=step == 0, spans=None))
        else:
            blocks.append(_cut_by_documents(cut, rank, owner, seq_len, *region, bounds, device))
    return RingPlan(rank, cut.degree, tuple(blocks), _hops(cut, _reach(cut, seq_len, bounds)))


def forget_plans() -> None:
    """Empties the memory of plans: those made beside fake tensors are of no use to others."""
    _plan.cache_clear()


Bounds = tuple[Tensor, Tensor, Tensor]
"""For all documents of all rows, (n,) each: row, first position, position after the last."""


def _document_bounds(documents: Tensor) -> Bounds:
    seq_len = documents.shape[1]
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    row, start = begins.nonzero(as_tuple=True)
    stop = start.roll(
        -1
    )  # the next document's start, which in the last document of a row is 0: the next row's
    return row, start, torch.where(stop == 0, seq_len, stop)


def _region(cut: SequenceCut, rank: int, owner: int, local_len: int) -> tuple[RowRange, RowRange] | None:
    """The rectangle of (queries of rank) x (keys of owner) that causality leaves; see the picture above."""
    whole, half = RowRange(0, local_len), local_len // 2
    if owner == rank:
        return whole, whole
    if not cut.zigzag:
        return (whole, whole) if owner < rank else None
    if owner < rank:
        return whole, RowRange(0, half)
    return RowRange(half, local_len), whole


def _cut_by_documents(
    cut: SequenceCut,
    rank: int,
    owner: int,
    seq_len: int,
    q: RowRange,
    k: RowRange,
    bounds: Bounds,
    device: torch.device,
) -> Block | None:
    row, start, stop = bounds
    q_from = cut.local_index(rank, start, seq_len).clamp(q.start, q.stop)
    q_to = cut.local_index(rank, stop, seq_len).clamp(q.start, q.stop)
    k_from = cut.local_index(owner, start, seq_len).clamp(k.start, k.stop)
    k_to = cut.local_index(owner, stop, seq_len).clamp(k.start, k.stop)
    live = (q_to > q_from) & (k_to > k_from)
    if not live.any():
        return None
    first_row = row[live] * (seq_len // cut.degree)
    q_rows, q_bounds = _pack(first_row + q_from[live], (q_to - q_from)[live], device)
    k_rows, k_bounds = _pack(first_row + k_from[live], (k_to - k_from)[live], device)
    if rank == owner:  # every token is in its own document
        q_rows = k_rows = AllRows()
    return Block(q_rows, k_rows, causal=rank == owner, spans=Spans(q_bounds, k_bounds))


def _pack(first: Tensor, length: Tensor, device: torch.device) -> tuple[Rows, list[int]]:
    """The rows first..first+length of each span behind each other, and the offsets at which the spans begin."""
    offsets = torch.cat([length.new_zeros(1), length.cumsum(0)])  # (n + 1,)
    index = torch.arange(int(offsets[-1])) + (first - offsets[:-1]).repeat_interleave(length)
    return RowList(index.to(device, non_blocking=True)), offsets.tolist()


def _reach(cut: SequenceCut, seq_len: int, bounds: Bounds | None) -> tuple[int, ...]:
    """By chunk: the last chunk that the document of its last token extends to."""
    if bounds is None:
        return (cut.n_chunks - 1,) * cut.n_chunks
    _, start, stop = bounds
    length = cut.chunk_len(seq_len)
    last_tokens = [(chunk + 1) * length - 1 for chunk in range(cut.n_chunks)]
    return tuple(int((stop[(start <= last) & (last < stop)].max() - 1) // length) for last in last_tokens)


@lru_cache(maxsize=256)
def _hops(cut: SequenceCut, reach: tuple[int, ...]) -> tuple[int, ...]:
    """How far each rank's K/V must travel: to the last rank with a later chunk that some document joins to it."""

    def joined(owner: int, rank: int) -> bool:
        return any(
            key_chunk < q_chunk <= reach[key_chunk]
            for key_chunk in cut.chunks_of(owner)
            for q_chunk in cut.chunks_of(rank)
        )

    return tuple(
        max((step for step in range(1, cut.degree) if joined(owner, (owner + step) % cut.degree)), default=0)
        for owner in range(cut.degree)
    )
