"""Matrix products that several ranks share: columns of one matrix, rows of the next.

Axis sliced: hidden (and, under sequence parallelism, the sequence between the products).

    column   Y = X W^T, W cut by outputs       rank r: Y_r = X W_r^T          X must be whole, Y_r is a slice of Y
    row      Z = Y V^T, V cut by inputs        rank r: Z_r = Y_r V_r^T        Y_r is a slice, Z = sum of the Z_r

Between the two nothing is exchanged: attention's heads and SwiGLU's elements are each on one rank. Collectives of a
half-block (t ranks, T tokens of width D), with sequence parallelism; without it an all-reduce takes the place of each
reduce-scatter, and of the gathers around it:

    forward    gather X, products   ...   product, reduce-scatter Z
    backward   dX products, reduce-scatter dX, dW products   ...   gather dZ, products
               X again, for dW: it was not kept. T D instead of T D / t elements would stay in memory for each gather

All products of one input stand under one gather, and their dX under one reduce-scatter. In backward the gather of X
travels under the products that make dX, and the reduce-scatter of dX under those that make dW.

The forward halves are single operators: selective recompute keeps their outputs and repeats neither the product nor
the communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.flop_counter import register_flop_formula

from titan5d.models.products import Products
from titan5d.parallel.tensor_collectives import (
    TensorCut,
    finish_gather,
    finish_sum,
    gather_sequence,
    start_gather,
    start_sum,
    whole,
)


class TensorParallelProducts(Products):
    """The products of a block whose weights are DTensors on the tensor axis.

    A weight that is Shard(0) is cut by outputs, Shard(1) by inputs. A Replicate one among the columns is that of the
    key/value heads when there are fewer heads than ranks: each rank computes the one head that its queries read, and
    its gradient is one of the summands of the whole (Partial).

    Args:
        replicated_rows: (start, stop) of the outputs this rank computes with a replicated weight.
    """

    def __init__(self, cut: TensorCut, replicated_rows: tuple[int, int] | None = None) -> None:
        self.cut = cut
        self.replicated_rows = replicated_rows

    def column(self, x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        """x (B, S/t, in) of the residual stream -> (B, S, this rank's outputs) of each layer."""
        outs = column_products(x, [self._rows(linear.weight) for linear in linears], self.cut)
        biases = [linear.bias for linear in linears]
        return [
            out if bias is None else out + self._rows(bias) for out, bias in zip(outs, biases, strict=True)
        ]

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """x (B, S, this rank's inputs) -> (B, S/t, out) of the residual stream."""
        out = row_product(x, _local(linear.weight), self.cut)
        if linear.bias is None:
            return out
        # Added once, after the sum; under sequence parallelism each rank's tokens give a summand of its gradient
        return out + local_replica(linear.bias, partial=self.cut.sequence_parallel)

    def shared(self, x: Tensor) -> Tensor:
        """x (B, S/t, N) of the residual stream, the same work on every rank -> (B, S, N)."""
        return whole(x, self.cut)

    def _rows(self, parameter: Tensor) -> Tensor:
        """This rank's rows (outputs) of a weight or bias."""
        assert isinstance(parameter, DTensor)
        if not isinstance(parameter.placements[0], Replicate):
            return _local(parameter)
        assert self.replicated_rows is not None
        start, stop = self.replicated_rows
        return local_replica(parameter, partial=True)[start:stop]


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def local_replica(parameter: Tensor, partial: bool) -> Tensor:
    """A replicated DTensor as a plain tensor. partial: this rank's gradient is a summand, otherwise it is whole."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial() if partial else Replicate()])


def column_products(x: Tensor, weights: Sequence[Tensor], cut: TensorCut) -> Sequence[Tensor]:
    """x (B, S/t, D) of the residual stream times this rank's W_i^T, W_i (N_i, D): (B, S, N_i) each."""
    if torch.is_grad_enabled():
        return _ColumnProducts.apply(x, cut, *weights)
    # The compiler loses its way in a Function without gradients
    return column_forward(x, weights, cut, keep=False)


def row_product(x: Tensor, weight: Tensor, cut: TensorCut) -> Tensor:
    """The sum over ranks of their x (B, S, N) times their W^T, W (D, N), as a piece of the stream: (B, S/t, D)."""
    if not torch.is_grad_enabled():
        return row_forward(x, weight, cut)
    # Saved before the product is made: a recomputed block stops once it has all that backward needs, so the product at
    # its end and its reduce-scatter are not made again.
    promise = _RowInputs.apply(x, weight, cut)
    return _RowOutput.apply(promise, row_forward(x.detach(), weight.detach(), cut))


def row_forward(x: Tensor, weight: Tensor, cut: TensorCut) -> Tensor:
    """`row_product` without a gradient."""
    return product_sum(x, weight, cut.group_name, cut.degree, cut.sequence_parallel, cut.overlap)


def column_forward(x: Tensor, weights: Sequence[Tensor], cut: TensorCut, keep: bool) -> list[Tensor]:
    """The outputs, and if `keep` what they were made of, last."""
    if cut.sequence_parallel:
        return gather_products(x, weights, cut.group_name, cut.degree, keep, cut.overlap)
    return [F.linear(x, weight) for weight in weights] + ([x] if keep else [])


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: TensorCut, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.cut = cut
        keep = not cut.regather_input
        outs = column_forward(x, weights, cut, keep)
        ctx.save_for_backward(outs[-1] if keep else x, *weights)
        return tuple(outs[: len(weights)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cut: TensorCut = ctx.cut
        x, *weights = ctx.saved_tensors
        needs_x, needs_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        found = column_gradients(
            grads,
            x,
            weights,
            cut.group_name,
            cut.degree,
            cut.sequence_parallel,
            cut.regather_input,
            needs_x,
            needs_weights,
        )
        grad_x = found[0] if needs_x else None
        grad_weights = found[-len(weights) :] if needs_weights else [None] * len(weights)
        return grad_x, None, *grad_weights


class _RowInputs(torch.autograd.Function):
    """The backward of a row product. What it returns has the shape of the product, and no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cut: TensorCut) -> Tensor:
        ctx.cut = cut
        ctx.save_for_backward(x, weight)
        batch, seq_len, _ = x.shape
        tokens = seq_len // cut.degree if cut.sequence_parallel else seq_len
        return x.new_zeros(()).expand(batch, tokens, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        cut: TensorCut = ctx.cut
        x, weight = ctx.saved_tensors
        if cut.overlap:
            grad, (grad_x,) = torch.ops.symm_mem.fused_all_gather_matmul(grad, [weight], 1, cut.group_name)
        else:
            if cut.sequence_parallel:
                grad = gather_sequence(grad, cut.group_name, cut.degree)
            grad_x = input_gradient([grad], [weight]) if ctx.needs_input_grad[0] else None
        return grad_x, weight_gradient(grad, x) if ctx.needs_input_grad[1] else None, None


class _RowOutput(torch.autograd.Function):
    """The forward of a row product: hands its output on, and its gradient to `_RowInputs`."""

    @staticmethod
    def forward(ctx: Any, promise: Tensor, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """d loss / d X of products Y_i = X W_i^T: the sum of dY_i W_i. dY_i (B, S, N_i), W_i (N_i, D) -> (B, S, D)."""
    total = grads[0].flatten(0, 1) @ weights[0]  # (B * S, D)
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total = total.addmm_(grad.flatten(0, 1), weight)
    return total.unflatten(0, grads[0].shape[:2])


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """d loss / d W of a product Y = X W^T: dY^T X. dY (B, S, N), X (B, S, D), whole -> (N, D).

    Nothing in backward waits for it but the optimizer, so it is the half that a zero-bubble schedule may put off.
    """
    return grad.flatten(0, 1).t() @ x.flatten(0, 1)


@torch.library.custom_op("titan5d::gather_products", mutates_args=())
def gather_products(
    x: Tensor, weights: Sequence[Tensor], group_name: str, degree: int, keep: bool, overlap: bool
) -> list[Tensor]:
    """The whole X of which x (B, S/t, D) is a piece, times each W_i^T, (N_i, D): (B, S, N_i). `keep`: X comes last."""
    cut = TensorCut(group_name, degree, rank=-1)
    if overlap:
        gathered, outs = torch.ops.symm_mem.fused_all_gather_matmul(
            x, [weight.t() for weight in weights], 1, group_name, return_A=keep
        )
        gathered, outs = gathered.contiguous() if keep else None, [out.contiguous() for out in outs]
    else:
        gathered = finish_gather(start_gather(x, cut), cut)
        outs = [F.linear(gathered, weight) for weight in weights]
    return [*outs, gathered] if keep else outs


@torch.library.custom_op("titan5d::product_sum", mutates_args=())
def product_sum(
    x: Tensor, weight: Tensor, group_name: str, degree: int, sequence_parallel: bool, overlap: bool
) -> Tensor:
    """The sum over ranks of x W^T, x (B, S, N), W (D, N): this rank's S/t tokens of it, or without the cut all."""
    if overlap:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x, weight.t(), "sum", 1, group_name
        ).contiguous()
    cut = TensorCut(group_name, degree, rank=-1, sequence_parallel=sequence_parallel)
    return finish_sum(start_sum(F.linear(x, weight), cut))


@torch.library.custom_op("titan5d::column_gradients", mutates_args=())
def column_gradients(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    group_name: str,
    degree: int,
    sequence_parallel: bool,
    regather: bool,
    needs_x: bool,
    needs_weights: bool,
) -> list[Tensor]:
    """[d loss / d x, if needed] and [d loss / d W_i, if needed] of products Y_i = X W_i^T; dY_i (B, S, N_i).

    x is what forward kept, a piece of X or X. One operator, so that a compiler cannot move the second gather into
    forward and keep what it returns.
    """
    cut = TensorCut(group_name, degree, rank=-1, sequence_parallel=sequence_parallel)
    gather = start_gather(x, cut) if sequence_parallel and regather and needs_weights else None
    total = start_sum(input_gradient(grads, weights), cut) if needs_x else None
    if needs_weights:
        whole_x = x if gather is None else finish_gather(gather, cut)
        grad_weights = [weight_gradient(grad, whole_x) for grad in grads]
    else:
        grad_weights = []
    return [*([] if total is None else [finish_sum(total)]), *grad_weights]


@gather_products.register_fake
def _(
    x: Tensor, weights: Sequence[Tensor], group_name: str, degree: int, keep: bool, overlap: bool
) -> list[Tensor]:
    batch, piece, dim = x.shape
    widths = [weight.shape[0] for weight in weights] + ([dim] if keep else [])
    return [x.new_empty(batch, piece * degree, width) for width in widths]


@product_sum.register_fake
def _(
    x: Tensor, weight: Tensor, group_name: str, degree: int, sequence_parallel: bool, overlap: bool
) -> Tensor:
    batch, seq_len, _ = x.shape
    return x.new_empty(batch, seq_len // degree if sequence_parallel else seq_len, weight.shape[0])


@column_gradients.register_fake
def _(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    group_name: str,
    degree: int,
    sequence_parallel: bool,
    regather: bool,
    needs_x: bool,
    needs_weights: bool,
) -> list[Tensor]:
    batch, seq_len, _ = grads[0].shape
    piece = seq_len // degree if sequence_parallel else seq_len
    grad_x = [x.new_empty(batch, piece, x.shape[-1])] if needs_x else []
    return grad_x + ([weight.new_empty(weight.shape) for weight in weights] if needs_weights else [])


@register_flop_formula(torch.ops.titan5d.gather_products)
def _(x_shape: Any, weight_shapes: Any, group_name: str, degree: int, *rest: Any, **kwargs: Any) -> int:
    tokens = x_shape[0] * x_shape[1] * degree
    return sum(2 * tokens * rows * columns for rows, columns in weight_shapes)


@register_flop_formula(torch.ops.titan5d.column_gradients)
def _(grad_shapes: Any, x_shape: Any, weight_shapes: Any, *rest: Any, **kwargs: Any) -> int:
    tokens = grad_shapes[0][0] * grad_shapes[0][1]
    halves = sum(rest[-2:])  # needs_x, needs_weights
    return halves * sum(2 * tokens * rows * columns for rows, columns in weight_shapes)


@register_flop_formula(torch.ops.titan5d.product_sum)
def _(x_shape: Any, weight_shape: Any, *rest: Any, **kwargs: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0] * weight_shape[1]
