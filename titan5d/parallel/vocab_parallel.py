"""Embedding and loss when each rank holds a slice of the vocabulary.

Axis sliced: vocabulary, for both matrices (V, D). Rank r of t holds rows [r n, (r + 1) n), n = ceil(V / t), fewer or
none at the end; nothing is padded, so no padding can enter a softmax, a gradient or a checkpoint.

    tokens    [ 7   2   9   0 ]       V = 10, t = 2
    rank 0    [ 0  e2   0  e0 ]       looks up rows 0..4, zeros for the others
    rank 1    [e7   0  e9   0 ]       looks up rows 5..9
    sum       [e7  e2  e9  e0 ]       reduce-scattered into the residual stream

The loss never gathers logits. Each rank has its slice of a chunk's logits; three numbers a token make it whole:

    rank r:  m_r = max of its logits     s_r = sum of exp(logit - m_r)     z_r = the target's logit, or 0
    all:     M = max of m_r              S = sum of s_r exp(m_r - M)       z = sum of z_r
    loss = log S + M - z                 d logit = exp(logit - M) / S - [is the target]

Collectives: embedding one reduce-scatter of T D, backward one all-gather. Loss one all-gather of the hidden states
T D, backward one reduce-scatter; one all-gather of 3 fp32 numbers a token for each chunk, which every rank combines
in the same order: all get the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titan5d.models.cross_entropy import IGNORE, ChunkedCrossEntropy, linear_cross_entropy, token_losses
from titan5d.models.output import OutputHead
from titan5d.parallel.tensor_collectives import TensorCut, gather_last, summed, whole


@dataclass(frozen=True)
class VocabSlice:
    """The rows [start, stop) of a vocabulary of `size` that one of `degree` ranks holds; DTensor's Shard(0)."""

    size: int
    degree: int
    rank: int

    @property
    def width(self) -> int:
        """Rows of the ranks that are full."""
        return -(-self.size // self.degree)

    @property
    def start(self) -> int:
        return min(self.rank * self.width, self.size)

    @property
    def stop(self) -> int:
        return min(self.start + self.width, self.size)

    def owned(self, ids: Tensor) -> Tensor:
        """Which of the ids this rank looks up. Ids outside of the vocabulary fall to the nearest rank, which raises."""
        above = self.start <= ids if self.rank > 0 else torch.ones_like(ids, dtype=torch.bool)
        return above & (ids < self.stop) if self.stop < self.size else above


class VocabParallelEmbedding(nn.Embedding):
    """Takes the place of the token embedding; `weight` (V, D) is a DTensor, Shard(0) on the tensor axis."""

    def __init__(self, embedding: nn.Embedding, cut: TensorCut) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = self.max_norm = None
        self.weight = embedding.weight
        self.cut = cut
        self.slice = VocabSlice(self.num_embeddings, cut.degree, cut.rank)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, S), the same on all ranks -> this rank's piece of the residual stream, (B, S/t, D).

        Raises ValueError when a row does not divide into pieces.
        """
        cut, seq_len = self.cut, tokens.shape[1]
        if cut.sequence_parallel and seq_len % cut.degree:
            raise ValueError(
                f"rows of {seq_len} tokens do not divide into {cut.degree} equal pieces, which sequence parallelism"
                f" over parallelism.tensor_parallel_degree = {cut.degree} needs; pad them to a multiple of {cut.degree}"
            )
        assert isinstance(self.weight, DTensor)
        owned = self.slice.owned(tokens)
        local_ids = torch.where(owned, tokens - self.slice.start, 0)
        rows = F.embedding(local_ids, self.weight.to_local())  # (B, S, D)
        return summed(rows * owned.unsqueeze(-1), cut)


class VocabParallelHead(OutputHead):
    """Takes the place of the output head; `weight` (V, D) is a DTensor, Shard(0) on the tensor axis."""

    def __init__(self, head: OutputHead, cut: TensorCut, gather_logits: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight = head.weight
        self.register_parameter("bias", None)
        self.cut = cut
        self.slice = VocabSlice(self.out_features, cut.degree, cut.rank)
        chunk_bytes = cast(ChunkedCrossEntropy, head.cross_entropy).chunk_bytes
        self.cross_entropy = VocabParallelCrossEntropy(self.slice, cut, gather_logits, chunk_bytes)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """hidden (B, S/t, D) -> whole logits (B, S, V) on all ranks; with labels (B, S): `(loss_sum, row_sums)`."""
        assert isinstance(self.weight, DTensor)
        weight = self.weight.to_local()
        if labels is not None:
            return self.cross_entropy(hidden, weight, labels)
        return _GatherLogits.apply(F.linear(whole(hidden, self.cut), weight), self.slice, self.cut)


class VocabParallelCrossEntropy(ChunkedCrossEntropy):
    """`ChunkedCrossEntropy` over a cut vocabulary: the same numbers, on every rank.

    Args:
        gather_logits: make each chunk's logits whole on every rank, instead of completing the softmax among them.
        chunk_bytes: largest piece of fp32 logits a rank holds at once, bytes; 0 = all at once.
    """

    def __init__(self, slice: VocabSlice, cut: TensorCut, gather_logits: bool, chunk_bytes: int) -> None:
        super().__init__(chunk_bytes)
        self.slice, self.cut, self.gather_logits = slice, cut, gather_logits
        losses = gathered_token_losses if gather_logits else parallel_token_losses
        self.losses_of = partial(losses, slice=slice, cut=cut)

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            hidden: (B, S/t, D), this rank's piece of the last hidden states.
            weight: (this rank's rows, D).
            labels: (B, S), the same on all ranks.

        Returns:
            What `ChunkedCrossEntropy` returns for the whole.
        """
        # from the width of a full slice, so that all ranks have equally many chunks
        chunks = self.chunks(labels.numel(), self.slice.size if self.gather_logits else self.slice.width)
        assert self.losses_of is not None
        return linear_cross_entropy(whole(hidden, self.cut), weight, labels, chunks, self.losses_of)


def parallel_token_losses(
    logits: Tensor, labels: Tensor, with_grad: bool, slice: VocabSlice, cut: TensorCut
) -> Tensor:
    """`token_losses` from this rank's columns of the logits: (rows, its width) fp32, overwritten by their gradient."""
    valid = labels != IGNORE  # (rows,)
    owned = valid & slice.owned(labels)
    target = torch.where(owned, labels - slice.start, 0).unsqueeze(-1)  # (rows, 1)
    top = logits.amax(-1)  # (rows,)
    at_target = logits.gather(-1, target).squeeze(-1) * owned
    total = logits.sub_(top.unsqueeze(-1)).exp_().sum(-1)

    mine = torch.stack((top, total, at_target), -1)  # (rows, 3)
    everyones = gather_last(mine, cut.group_name, cut.degree).unflatten(-1, (cut.degree, 3))  # (rows, t, 3)
    tops, totals, at_targets = everyones.unbind(-1)
    whole_top = tops.amax(-1)
    whole_total = (totals * (tops - whole_top.unsqueeze(-1)).exp()).sum(-1)
    if with_grad:  # softmax - one_hot, and zeros in rows without a target
        factor = valid * (top - whole_top).exp() / whole_total
        logits.mul_(factor.unsqueeze(-1)).scatter_add_(-1, target, -owned.to(logits.dtype).unsqueeze(-1))
    return torch.where(valid, whole_total.log() + (whole_top - at_targets.sum(-1)), 0.0)


def gathered_token_losses(
    logits: Tensor, labels: Tensor, with_grad: bool, slice: VocabSlice, cut: TensorCut
) -> Tensor:
    """The same by gathering the columns of all ranks: (rows, V) fp32 on each."""
    everything = gather_vocabulary(logits, slice, cut)
    losses = token_losses(everything, labels, with_grad)
    if with_grad:
        logits.copy_(everything[:, slice.start : slice.stop])
    return losses


def gather_vocabulary(columns: Tensor, slice: VocabSlice, cut: TensorCut) -> Tensor:
    """This rank's columns (..., its width) -> those of all ranks, (..., V). What fills short slices is cut off."""
    padded = F.pad(columns, (0, slice.width - columns.shape[-1]))
    return gather_last(padded, cut.group_name, cut.degree)[..., : slice.size].contiguous()


class _GatherLogits(torch.autograd.Function):
    """Every rank computes the same from the whole logits, so the gradient of its columns is there already."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, slice: VocabSlice, cut: TensorCut) -> Tensor:
        ctx.slice = slice
        return gather_vocabulary(columns, slice, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., ctx.slice.start : ctx.slice.stop].contiguous(), None, None
