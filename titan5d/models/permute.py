"""Tokens to their experts and back: gathers in both directions, forward and backward.

    token            0      1      2                  experts (T, top_k): where each choice goes
    experts        2 0    0 1    2 2                  a choice is one (token, slot): number token * top_k + slot
                          sort, equal experts keep the order of tokens
    sorted         0 0 | 1 | 2 2 2                    ends = [2, 3, 6]
    choice         1 2   3   0 4 5

`permute` copies each token once for each of its choices, in that order; `combine` adds the copies up again, weighted.
Each is the other's gradient. Written out, because torch's own backward of an index is an atomic addition, which is
slow and, on a GPU, not repeatable; here every sum is a gather of one slot after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Order(NamedTuple):
    """Where the N = T * top_k choices of T tokens stand once they are sorted by expert."""

    choice: Tensor
    """(N,) int64: the choice that stands at each place."""
    place: Tensor
    """(T, top_k) int64: the place at which each choice stands."""
    ends: Tensor
    """(E,) int32: where the choices of each expert end. Behind the last stand those that go nowhere."""


def sort_by_expert(experts: Tensor, n_experts: int) -> Order:
    """The order of the choices `experts` (T, top_k), numbers 0..n_experts-1, or n_experts for nowhere."""
    flat = experts.flatten()  # (T * top_k,)
    ordered, choice = torch.sort(flat, stable=True)
    place = torch.empty_like(choice)
    place[choice] = torch.arange(choice.numel(), device=choice.device)
    numbers = torch.arange(n_experts, device=choice.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    return Order(choice, place.view_as(experts), ends)


def permute(tokens: Tensor, order: Order) -> Tensor:
    """(T, D) -> (N, D): the token of each choice, choices sorted by expert."""
    return _Permute.apply(tokens, order.choice, order.place)


def combine(rows: Tensor, order: Order, weights: Tensor | None) -> Tensor:
    """(N, D) -> (T, D): for each token the sum over its choices of weight * row, added in fp32.

    Args:
        rows: one for each choice, sorted by expert; zero where a choice goes nowhere.
        weights: (T, top_k) fp32; None = all 1.
    """
    if weights is None:
        return _Sum.apply(rows, order.choice, order.place)
    return _WeightedSum.apply(rows, weights, order.choice, order.place)


def _gather(tokens: Tensor, choice: Tensor, place: Tensor) -> Tensor:
    return tokens.index_select(0, choice // place.shape[1])


def _add_slots(rows: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """sum over slots s of weights[t, s] * rows[place[t, s]], fp32 (or fp64)."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    first = rows.index_select(0, place[:, 0])  # (T, D)
    total = first.to(wide) if weights is None else first * weights[:, 0, None]
    for slot in range(1, place.shape[1]):
        row = rows.index_select(0, place[:, slot])  # (T, D)
        total = total.add_(row) if weights is None else total.addcmul_(row, weights[:, slot, None])
    return total


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, choice: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return _gather(tokens, choice, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _add_slots(grad, place, None).to(grad.dtype), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, choice: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(choice, place)
        return _add_slots(rows, place, None).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, *ctx.saved_tensors), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, choice: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, choice, place)
        return _add_slots(rows, place, weights).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # d/dweight: the token's gradient times the row; d/drow: the gradient times the weight. In the order of rows
        rows, weights, choice, place = ctx.saved_tensors
        slots, wide = place.shape[1], weights.dtype
        grads = _gather(grad, choice, place)  # (N, D)
        pieces = zip(rows.chunk(slots), grads.chunk(slots), strict=True)  # wide copies of a piece at a time
        products = torch.cat([torch.linalg.vecdot(row.to(wide), g.to(wide)) for row, g in pieces])  # (N,)
        return grads.mul_(weights.take(choice)[:, None]), products.take(place), None, None
