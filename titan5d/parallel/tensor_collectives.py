"""The two crossings between the residual stream and a product that several ranks share, and their gradients.

Axis crossed: sequence (sequence parallel) or none (every rank holds the whole stream). t = degree.

                  sequence parallel                          without
    whole    fwd  all-gather       (B, S/t, D) -> (B, S, D)  nothing
             bwd  reduce-scatter                             all-reduce
    summed   fwd  reduce-scatter   (B, S, D) -> (B, S/t, D)  all-reduce
             bwd  all-gather                                 nothing

`whole` leads into a product: every rank needs every token, and each sends back a summand of the gradient. `summed`
leads out: each rank has a summand of every token, and every token's gradient goes to all of them. (The pairs f, f-bar
and g, g-bar of Megatron-LM, Shoeybi et al. 2019, Korthikanti et al. 2022.)

Collectives are started and finished in two calls, so that a product can run in between. They run inside custom
operators, which a compiler neither moves nor splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan5d.parallel.attention_op import group_named

# torch 2.13 renamed these two.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class TensorCut:
    """The tensor axis as one rank sees it.

    Attributes:
        group_name: of the ranks that share the products; operators take names, not groups.
        degree, rank: how many they are, and which one this is.
        sequence_parallel: the residual stream is cut along the sequence, S / degree tokens of each row on each rank.
        regather_input: the gathered input of a product is not kept for backward, but gathered again there.
        overlap: products run in pieces while others travel (CUDA, symmetric memory).
    """

    group_name: str
    degree: int
    rank: int
    sequence_parallel: bool = True
    regather_input: bool = True
    overlap: bool = False


class Pending(NamedTuple):
    """A collective under way: its result, and what to wait for before reading it."""

    result: Tensor
    work: Any


def start_gather(piece: Tensor, cut: TensorCut) -> Pending:
    """Starts to gather the pieces (B, S/t, D) of all ranks."""
    piece = piece.contiguous()
    stacked = piece.new_empty(cut.degree * piece.shape[0], *piece.shape[1:])  # (t * B, S/t, D)
    return Pending(stacked, _all_gather(stacked, piece, group=group_named(cut.group_name), async_op=True))


def finish_gather(gather: Pending, cut: TensorCut) -> Tensor:
    """Waits for `start_gather` and returns (B, S, D)."""
    gather.work.wait()
    ranks_apart = gather.result.unflatten(0, (cut.degree, -1))  # (t, B, S/t, D)
    # One row needs no copy: its pieces lie end to end already
    return ranks_apart.transpose(0, 1).flatten(1, 2)  # (B, S, D)


def start_sum(summand: Tensor, cut: TensorCut) -> Pending:
    """Starts to sum (B, S, D) over all ranks, of which each gets its S/t tokens under sequence parallelism.

    Without it the summand, which must be contiguous, is overwritten.
    """
    group = group_named(cut.group_name)
    if not cut.sequence_parallel:
        return Pending(summand, dist.all_reduce(summand, group=group, async_op=True))
    pieces = summand.unflatten(1, (cut.degree, -1)).transpose(0, 1).contiguous()  # (t, B, S/t, D)
    total = torch.empty_like(pieces[0])
    return Pending(total, _reduce_scatter(total, pieces.flatten(0, 1), group=group, async_op=True))


def finish_sum(pending: Pending) -> Tensor:
    """Waits for `start_sum` and returns (B, S/t, D), or (B, S, D) without sequence parallelism."""
    pending.work.wait()
    return pending.result


@torch.library.custom_op("titan5d::gather_sequence", mutates_args=())
def gather_sequence(piece: Tensor, group_name: str, degree: int) -> Tensor:
    """(B, S/t, D) of each rank -> (B, S, D) on all."""
    cut = TensorCut(group_name, degree, rank=-1)
    return finish_gather(start_gather(piece, cut), cut)


@torch.library.custom_op("titan5d::sum_sequence", mutates_args=())
def sum_sequence(summand: Tensor, group_name: str, degree: int, sequence_parallel: bool) -> Tensor:
    """The sum of the ranks' (B, S, D): this rank's (B, S/t, D) of it, or without sequence parallelism all."""
    cut = TensorCut(group_name, degree, rank=-1, sequence_parallel=sequence_parallel)
    if not sequence_parallel:
        summand = summand.clone(memory_format=torch.contiguous_format)
    return finish_sum(start_sum(summand, cut))


@torch.library.custom_op("titan5d::gather_last", mutates_args=())
def gather_last(x: Tensor, group_name: str, degree: int) -> Tensor:
    """Joins the ranks' x (..., N) along the last dimension: (..., t * N)."""
    x = x.contiguous()
    stacked = x.new_empty(degree * x.shape[0], *x.shape[1:])
    _all_gather(stacked, x, group=group_named(group_name))
    ranks_apart = stacked.unflatten(0, (degree, -1))  # (t, ..., N)
    return ranks_apart.movedim(0, -2).flatten(-2).clone()  # (..., t * N)


@gather_sequence.register_fake
def _(piece: Tensor, group_name: str, degree: int) -> Tensor:
    return piece.new_empty(piece.shape[0], piece.shape[1] * degree, piece.shape[2])


@sum_sequence.register_fake
def _(summand: Tensor, group_name: str, degree: int, sequence_parallel: bool) -> Tensor:
    batch, seq_len, dim = summand.shape
    return summand.new_empty(batch, seq_len // degree if sequence_parallel else seq_len, dim)


@gather_last.register_fake
def _(x: Tensor, group_name: str, degree: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] * degree)


def whole(x: Tensor, cut: TensorCut) -> Tensor:
    """The residual stream x (B, S/t, D), whole on every rank: (B, S, D)."""
    if torch.is_grad_enabled():
        return _Whole.apply(x, cut)
    # the compiler loses its way in a Function without gradients
    return gather_sequence(x, cut.group_name, cut.degree) if cut.sequence_parallel else x


def summed(x: Tensor, cut: TensorCut) -> Tensor:
    """The sum over ranks of their x (B, S, D), as a piece of the residual stream: (B, S/t, D)."""
    if torch.is_grad_enabled():
        return _Summed.apply(x, cut)
    return sum_sequence(x, cut.group_name, cut.degree, cut.sequence_parallel)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: TensorCut) -> Tensor:
        ctx.cut = cut
        return gather_sequence(x, cut.group_name, cut.degree) if cut.sequence_parallel else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cut = ctx.cut
        return sum_sequence(grad, cut.group_name, cut.degree, cut.sequence_parallel), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: TensorCut) -> Tensor:
        ctx.cut = cut
        return sum_sequence(x, cut.group_name, cut.degree, cut.sequence_parallel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cut = ctx.cut
        return gather_sequence(grad, cut.group_name, cut.degree) if cut.sequence_parallel else grad, None
