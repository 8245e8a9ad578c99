"""Weight gradients that can wait: the second half W of a split backward.

    backward of Y = X W^T      dX = dY W      at once: the stage before waits for it           action I
                               dW = dY^T X    kept as (X, dY), worked off later                action W

Of every linear layer behind `Products` only the gradient of the input goes through autograd. The weight's is made by
a store: at once in a whole backward (B), else when the schedule says so. Weights are hidden from autograd, so that a
compiled block, whose backward is one fixed graph, serves both cases.

What is not put off: gradients of norms, biases, embedding, head, router and experts. They are made in I; for norms and
biases that is little, the head's is made in its forward (cross_entropy.py).

The store goes by the micro-batch whose backward is running, not by the forward that kept X: a recomputed block puts
off the gradients of its second forward, and nothing twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from titan5d.models.decoder import Decoder
from titan5d.models.products import Products
from titan5d.parallel.local_part import placed
from titan5d.parallel.tensor_collectives import TensorCut, summed
from titan5d.parallel.tensor_products import (
    TensorParallelProducts,
    column_forward,
    column_gradients,
    input_gradient,
    local_replica,
    weight_gradient,
)

Key = tuple[int, int]
"""(stage, micro-batch)."""


class WeightGradientStore:
    """Weight gradients of one rank that wait to be computed."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[Callable[[], None]]] = {}
        self._open: list[Callable[[], None]] | None = None
        self._linears: list[tuple[nn.Linear, Rows]] = []
        self._number = next(_NUMBERS)
        _STORES[self._number] = self

    def register(self, linear: nn.Linear, rows: Rows = None) -> Tensor:
        """A tensor that names `linear` to an operator: operators take tensors and numbers, and a number would be
        compiled in, one graph a layer.

        Args:
            rows: the rows of the weight that this rank computes with, where ranks hold copies and share the rows;
                None = all that it holds.
        """
        self._linears.append((linear, rows))
        return torch.tensor([self._number, len(self._linears) - 1], device="cpu")

    def target(self, index: int) -> tuple[Tensor, Rows]:
        """(weight, rows) of a registered layer: the weight it has right now, as FSDP exchanges whole and sharded
        ones."""
        linear, rows = self._linears[index]
        return linear.weight, rows

    @contextmanager
    def putting_off(self, key: Key) -> Iterator[None]:
        """Inside, what `add` is given waits under `key`."""
        self._open = self._waiting.setdefault(key, [])
        try:
            yield
        finally:
            self._open = None

    @property
    def is_putting_off(self) -> bool:
        return self._open is not None

    def put_off(self, work: Callable[[], None]) -> None:
        """Keeps `work` until `run`."""
        assert self._open is not None
        self._open.append(work)

    @torch.no_grad()
    def run(self, key: Key) -> None:
        """Computes what waits under `key`. Each item is dropped as soon as it is done."""
        waiting = self._waiting.pop(key)
        waiting.reverse()
        while waiting:
            waiting.pop()()

    def __len__(self) -> int:
        """How many (stage, micro-batch) wait."""
        return len(self._waiting)


Rows = tuple[int, int] | None
"""(start, stop)."""

_NUMBERS = count()
_STORES: weakref.WeakValueDictionary[int, WeightGradientStore] = weakref.WeakValueDictionary()
"""Number -> store, as process groups are known by name to operators that cannot take objects."""


def accumulate(parameter: Tensor, gradient: Tensor, rows: Rows = None) -> None:
    """parameter.grad += gradient, the part of it that this rank has.

    Of a DTensor it is placed as the parameter, except where `rows` are given: then all ranks hold the parameter and
    this one has a summand (Partial), zero outside of its rows.
    """
    if not isinstance(parameter, DTensor):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        return
    if parameter.grad is None:
        placements = parameter.placements if rows is None else (Partial(),)
        if rows is not None:
            summand = torch.zeros_like(parameter.to_local())
            summand[slice(*rows)] = gradient
            gradient = summand
        parameter.grad = placed(gradient, parameter, placements)
        return
    assert isinstance(parameter.grad, DTensor)
    local = parameter.grad.to_local()
    (local if rows is None else local[slice(*rows)]).add_(gradient)


def defer_weight_gradients(model: Decoder, store: WeightGradientStore, compiled: bool) -> None:
    """Makes the linear layers of every block (in place, after the tensor cut) leave their weight gradients to
    `store`. compiled: the blocks will be compiled."""
    for module in model.modules():
        products = getattr(module, "products", None)
        if isinstance(products, TensorParallelProducts):
            deferred: Products = DeferredTensorProducts(products, compiled)
        elif isinstance(products, Products):
            deferred = DeferredProducts(compiled)
        else:
            continue
        setattr(module, "products", deferred)  # noqa: B010 - to the type checker a module has only parts
        for linear in module.children():
            if isinstance(linear, nn.Linear):
                linear.gradient_key = store.register(linear, _rows(linear, products))


def _rows(linear: nn.Linear, products: Products) -> Rows:
    """Key/value heads shared by more ranks than there are: each computes with the rows of one head."""
    weight = linear.weight
    if isinstance(products, TensorParallelProducts) and isinstance(weight, DTensor):
        return products.replicated_rows if weight.placements[0].is_replicate() else None
    return None


class DeferredProducts(Products):
    """The products of one device, their weight gradients made by a store.

    Args:
        compiled: gradients go through an operator, which the compiler does not look into.
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled

    def column(self, x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        if not torch.is_grad_enabled():
            return super().column(x, linears)
        weights = [linear.weight.detach() for linear in linears]
        outs = _products(x, None, self.compiled, weights, _keys(linears))
        biases = [linear.bias for linear in linears]
        return [out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True)]

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return self.column(x, (linear,))[0]


class DeferredTensorProducts(TensorParallelProducts):
    """The same where several ranks share the products. A gather that only weight gradients need moves to W with them.

    The gradient that enters a `row` product is always gathered before it is multiplied, never in pieces.
    """

    def __init__(self, products: TensorParallelProducts, compiled: bool) -> None:
        super().__init__(products.cut, products.replicated_rows)
        self.compiled = compiled

    def column(self, x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        if not torch.is_grad_enabled():
            return super().column(x, linears)
        weights = [self._rows(linear.weight.detach()) for linear in linears]
        outs = _products(x, self.cut, self.compiled, weights, _keys(linears))
        biases = [linear.bias for linear in linears]
        return [out if bias is None else out + self._rows(bias) for out, bias in zip(outs, biases, strict=True)]

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        if not torch.is_grad_enabled():
            return super().row(x, linear)
        weight = self._rows(linear.weight.detach())
        (part,) = _products(x, None, self.compiled, [weight], _keys((linear,)))
        out = summed(part, self.cut)
        return out if linear.bias is None else out + local_replica(linear.bias, self.cut.sequence_parallel)


NOT_SHARED = ("", 1, False, False)
"""Group name, degree, sequence_parallel and regather of products that one rank computes alone."""


def _keys(linears: Sequence[nn.Linear]) -> list[Tensor]:
    return [cast(Tensor, linear.gradient_key) for linear in linears]


def _products(
    x: Tensor, cut: TensorCut | None, compiled: bool, weights: Sequence[Tensor], keys: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Y_i = X W_i^T, whose backward returns dX and leaves the dW_i to the store. cut: X is gathered first."""
    if compiled or cut is not None:
        return _ProductsOfOneInput.apply(x, cut, compiled, *weights, *keys)
    kept = _Kept()
    return _Multiply.apply(_Keep.apply(x, kept, *weights, *keys), kept, *weights)


class _Kept:
    """What `_Keep` keeps for `_Multiply`: the context of its call."""

    ctx: Any


class _Keep(torch.autograd.Function):
    """x, which is kept for the product that follows, as are the weights and keys.

    A function of its own, because a function keeps its tensors at its end: recompute stops as soon as the last tensor
    that backward needs is there, and so need not repeat a block's last product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: _Kept, *weights_and_keys: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights_and_keys)
        ctx.others = 1 + len(weights_and_keys)
        kept.ctx = ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.others


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: _Kept, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.kept = kept
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.kept.ctx.saved_tensors
        count = len(grads)
        grad_x = _gradients(list(grads), x, rest[:count], rest[count:], *NOT_SHARED)
        return grad_x, *[None] * (1 + count)


class _ProductsOfOneInput(torch.autograd.Function):
    """`_products` as one function."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cut: TensorCut | None, compiled: bool, *weights_and_keys: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.cut, ctx.compiled = cut, compiled
        weights = weights_and_keys[: len(weights_and_keys) // 2]
        kept = x
        if cut is None:
            outs = [F.linear(x, weight) for weight in weights]
        else:
            outs = column_forward(x, weights, cut, keep=not cut.regather_input)
            if not cut.regather_input:
                kept = outs.pop()
        ctx.save_for_backward(kept, *weights_and_keys)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        cut: TensorCut | None = ctx.cut
        shared = (
            NOT_SHARED
            if cut is None
            else (cut.group_name, cut.degree, cut.sequence_parallel, cut.regather_input)
        )
        gradients = product_gradients if ctx.compiled else _gradients
        grad_x = gradients(list(grads), x, rest[: len(grads)], rest[len(grads) :], *shared)
        return grad_x, *[None] * (2 + len(rest))


def _gradients(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    group_name: str,
    degree: int,
    sequence_parallel: bool,
    regather: bool,
    keep_copies: bool = False,
) -> Tensor:
    """Returns d loss / d x of products Y_i = X W_i^T, given dY_i (B, S, N_i), and leaves the d loss / d W_i to the
    store. degree 1: x is X. Otherwise see `column_gradients`."""
    named = [key.tolist() for key in keys]  # (store, layer)
    store = _STORES[named[0][0]]
    targets = [store.target(index) for _, index in named]

    def make(x: Tensor, grads: Sequence[Tensor], needs_x: bool, needs_weights: bool) -> list[Tensor]:
        if degree > 1:
            how = (group_name, degree, sequence_parallel, regather, needs_x, needs_weights)
            return column_gradients(grads, x, weights, *how)
        grad_x = [input_gradient(grads, weights)] if needs_x else []
        return grad_x + ([weight_gradient(grad, x) for grad in grads] if needs_weights else [])

    def add(gradients: Sequence[Tensor]) -> None:
        for (weight, rows), gradient in zip(targets, gradients, strict=True):
            accumulate(weight, gradient, rows)

    if not store.is_putting_off:
        grad_x, *grad_weights = make(x, grads, True, True)
        add(grad_weights)
        return grad_x
    (grad_x,) = make(x, grads, True, False)
    if keep_copies:  # a compiled graph uses its buffers again once the operators that read them have run
        x, grads = x.clone(), [grad.clone() for grad in grads]
    store.put_off(lambda: add(make(x, grads, False, True)))
    return grad_x


@torch.library.custom_op("titan5d::product_gradients", mutates_args=())
def product_gradients(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    group_name: str,
    degree: int,
    sequence_parallel: bool,
    regather: bool,
) -> Tensor:
    """`_gradients` for compiled graphs. Its output is used, so no compiler drops it for having no effect."""
    return _gradients(
        grads, x, weights, keys, group_name, degree, sequence_parallel, regather, keep_copies=True
    )


@product_gradients.register_fake
def _(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    group_name: str,
    degree: int,
    sequence_parallel: bool,
    regather: bool,
) -> Tensor:
    batch, seq_len, _ = grads[0].shape
    return x.new_empty(batch, seq_len // degree if sequence_parallel else seq_len, x.shape[-1])
