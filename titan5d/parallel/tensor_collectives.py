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

Collectives are started and finished in two calls, so that a product can run in between. They are torch's functional
ones: visible to the compiler and to whoever counts operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_collectives = torch.ops._c10d_functional


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


def start_gather(piece: Tensor, cut: TensorCut) -> Tensor:
    """Starts to gather (B, S/t, D) from all ranks; the result is for `finish_gather`."""
    return _collectives.all_gather_into_tensor(piece.contiguous(), cut.degree, cut.group_name)


def finish_gather(pending: Tensor, cut: TensorCut) -> Tensor:
    """Waits for `start_gather` and returns (B, S, D)."""
    stacked = _collectives.wait_tensor(pending)  # (t * B, S/t, D)
    ranks_apart = stacked.unflatten(0, (cut.degree, -1))  # (t, B, S/t, D)
    # One row needs no copy: its pieces lie end to end already
    return ranks_apart.transpose(0, 1).flatten(1, 2)  # (B, S, D)


def start_sum(summand: Tensor, cut: TensorCut) -> Tensor:
    """Starts to sum (B, S, D) over all ranks, of which each gets its S/t tokens under sequence parallelism."""
    if not cut.sequence_parallel:
        return _collectives.all_reduce(summand, "sum", cut.group_name)
    pieces = summand.unflatten(1, (cut.degree, -1)).transpose(0, 1)  # (t, B, S/t, D)
    return _collectives.reduce_scatter_tensor(
        pieces.flatten(0, 1).contiguous(), "sum", cut.degree, cut.group_name
    )


def finish_sum(pending: Tensor) -> Tensor:
    """Waits for `start_sum` and returns (B, S/t, D), or (B, S, D) without sequence parallelism."""
    return _collectives.wait_tensor(pending)


def gather_last(x: Tensor, cut: TensorCut) -> Tensor:
    """Joins the ranks' x (..., N) along the last dimension: (..., t * N). No gradient."""
    stacked = _collectives.all_gather_into_tensor(x[None].contiguous(), cut.degree, cut.group_name)
    return _collectives.wait_tensor(stacked).movedim(0, -2).flatten(-2)  # (t, ..., N) -> (..., t, N) -> (..., t * N)


def whole(x: Tensor, cut: TensorCut) -> Tensor:
    """The residual stream x (B, S/t, D), whole on every rank: (B, S, D)."""
    return _Whole.apply(x, cut)


def summed(x: Tensor, cut: TensorCut) -> Tensor:
    """The sum over ranks of their x (B, S, D), as a piece of the residual stream: (B, S/t, D)."""
    return _Summed.apply(x, cut)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: TensorCut) -> Tensor:
        ctx.cut = cut
        return finish_gather(start_gather(x, cut), cut) if cut.sequence_parallel else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return finish_sum(start_sum(grad, ctx.cut)), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: TensorCut) -> Tensor:
        ctx.cut = cut
        return finish_sum(start_sum(x, cut))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cut = ctx.cut
        return (finish_gather(start_gather(grad, cut), cut) if cut.sequence_parallel else grad), None
