"""Products of groups of rows, each group with a matrix of its own.

    rows (N, K)    [ group 0 | group 1 |   | group 3 | tail ]       ends (E,): where each group ends
                        |         |      |      |       |
    product (N, M) [ x w0^T  | x w1^T  |   | x w3^T  |  0   ]       weight (E, M, K)

Groups may be empty, and rows behind the last end (tokens that go to no expert) belong to none. torch's kernel leaves
those rows unset and takes some sizes and types only; here they are zero and everything is taken.

Two operators of torch: to the compiler, to meta tensors and to activation checkpointing each is one node of a known
shape, whatever the groups, and `FlopCounterMode` counts it (every row as if it were in a group).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_kernel: Any = getattr(F, "grouped_mm", None)


def has_kernel(left: Tensor, right: Tensor) -> bool:
    """Whether torch multiplies groups of these two in one kernel; else there is a loop over the groups."""
    types = (torch.bfloat16,) if left.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    # each row must begin at a multiple of 16 bytes
    widths = (left.shape[-1], right.shape[-1], right.shape[-2])
    fits = left.dtype in types and all(width * left.element_size() % 16 == 0 for width in widths)
    return _kernel is not None and fits and left.shape[0] > 0


@torch.library.custom_op("titan5d::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor, has_tail: bool) -> Tensor:
    """rows[i] @ weight[e].T for row i of group e.

    Args:
        rows: (N, K).
        weight: (E, M, K), the type of rows.
        ends: (E,) int32, increasing; group e is rows[ends[e-1]:ends[e]].
        has_tail: whether rows may follow the last group.

    Returns:
        (N, M); zero in the tail.
    """
    if has_kernel(rows, weight):
        out = _kernel(rows.contiguous(), weight.transpose(-2, -1), offs=ends)
        return _clear_tail(out, ends) if has_tail else out
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    for expert, (start, end) in enumerate(_spans(ends)):
        torch.mm(rows[start:end], weight[expert].t(), out=out[start:end])
    return out


@torch.library.custom_op("titan5d::grouped_mm_weight", mutates_args=())
def grouped_mm_weight(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """grad[group e].T @ rows[group e]: the gradient of `weight`, (E, M, K); zero where a group is empty.

    Args:
        grad: (N, M), of the product.
        rows: (N, K).
        ends: (E,) int32.
    """
    grad, rows = grad.contiguous(), rows.contiguous()
    if has_kernel(grad, rows):
        return _kernel(grad.t(), rows, offs=ends)
    out = rows.new_zeros(ends.shape[0], grad.shape[1], rows.shape[1])
    for expert, (start, end) in enumerate(_spans(ends)):
        torch.mm(grad[start:end].t(), rows[start:end], out=out[expert])
    return out


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


def _clear_tail(out: Tensor, ends: Tensor) -> Tensor:
    if out.is_cuda:  # the end is known to the device only
        tail = torch.arange(out.shape[0], device=out.device) >= ends[-1]
        return out.masked_fill_(tail[:, None], 0)
    out[int(ends[-1]) :].zero_()
    return out


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor, has_tail: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@grouped_mm_weight.register_fake
def _(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], grad.shape[1], rows.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, ends, ctx.has_tail = inputs
    ctx.save_for_backward(rows, weight, ends)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    rows, weight, ends = ctx.saved_tensors
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = grouped_mm(grad, weight.transpose(-2, -1), ends, ctx.has_tail)
    if ctx.needs_input_grad[1]:
        grad_weight = grouped_mm_weight(grad, rows, ends)
    return grad_rows, grad_weight, None, None


grouped_mm.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.titan5d.grouped_mm)
def _flops(rows: Any, weight: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * rows[0] * rows[1] * weight[1]


@register_flop_formula(torch.ops.titan5d.grouped_mm_weight)
def _flops_weight(grad: Any, rows: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * rows[0] * rows[1] * grad[1]
