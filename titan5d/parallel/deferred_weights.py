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
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titan5d.models.decoder import Decoder
from titan5d.models.products import Products

Key = tuple[int, int]
"""(stage, micro-batch)."""


class WeightGradientStore:
    """Weight gradients of one rank that wait to be computed."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[Callable[[], None]]] = {}
        self._open: list[Callable[[], None]] | None = None
        self._linears: list[nn.Linear] = []
        self._number = next(_NUMBERS)
        _STORES[self._number] = self

    def register(self, linear: nn.Linear) -> Tensor:
        """A tensor that names `linear` to an operator: operators take tensors and numbers, and a number would be
        compiled in, one graph a layer."""
        self._linears.append(linear)
        return torch.tensor([self._number, len(self._linears) - 1], device="cpu")

    def weight(self, index: int) -> Tensor:
        """The weight that a registered layer has right now; FSDP exchanges whole and sharded ones."""
        return self._linears[index].weight

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

    def add(self, parameter: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Adds what `gradient` computes, the local part, to the gradient of `parameter`: now, or when `run` is
        called."""
        if self._open is None:
            accumulate(parameter, gradient())
        else:
            self._open.append(lambda: accumulate(parameter, gradient()))

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


_NUMBERS = count()
_STORES: weakref.WeakValueDictionary[int, WeightGradientStore] = weakref.WeakValueDictionary()
"""Number -> store, as process groups are known by name to operators that cannot take objects."""


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """parameter.grad += gradient; of a DTensor this rank's part, placed as the parameter is."""
    if isinstance(parameter, DTensor):
        if parameter.grad is None:
            parameter.grad = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.to_local().add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def defer_weight_gradients(model: Decoder, store: WeightGradientStore, compiled: bool) -> None:
    """Makes the linear layers of every block (in place) leave their weight gradients to `store`."""
    for module in model.modules():
        products = getattr(module, "products", None)
        if type(products) is not Products:
            continue
        for linear in module.children():
            if isinstance(linear, nn.Linear):
                linear.gradient_key = store.register(linear)  # type: ignore[assignment]  # no buffer: not saved
        module.products = DeferredProducts(compiled)  # type: ignore[assignment]


class DeferredProducts(Products):
    """The products of one device, their weight gradients made by a store.

    Args:
        compiled: the block will be compiled: gradients go through an operator, which the compiler does not look into.
    """

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled

    def column(self, x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        weights = [linear.weight.detach() for linear in linears]
        keys = [linear.gradient_key for linear in linears]
        outs = _Products.apply(x, self.compiled, *weights, *keys)
        biases = [linear.bias for linear in linears]
        return [out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True)]

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return self.column(x, (linear,))[0]


class _Products(torch.autograd.Function):
    """Y_i = X W_i^T, whose backward returns dX and leaves the dW_i to the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, compiled: bool, *weights_and_keys: Tensor) -> tuple[Tensor, ...]:
        ctx.compiled = compiled
        ctx.save_for_backward(x, *weights_and_keys)
        return tuple(F.linear(x, weight) for weight in weights_and_keys[: len(weights_and_keys) // 2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        weights, keys = rest[: len(grads)], rest[len(grads) :]
        gradients = product_gradients if ctx.compiled else _gradients
        return gradients(list(grads), x, weights, keys), *[None] * (1 + len(rest))


def _gradients(
    grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], keys: Sequence[Tensor], keep_copies: bool = False
) -> Tensor:
    """Returns d loss / d X (..., D) of products Y_i = X W_i^T, the sum of dY_i W_i; hands (X, dY_i) to the store."""
    flat_grads = [grad.flatten(0, -2) for grad in grads]  # (T, N_i)
    total = flat_grads[0] @ weights[0]  # (T, D)
    for grad, weight in zip(flat_grads[1:], weights[1:], strict=True):
        total = total.addmm_(grad, weight)
    flat_x = x.flatten(0, -2)  # (T, D)
    named = [key.tolist() for key in keys]  # (store, layer)
    if keep_copies and _STORES[named[0][0]].is_putting_off:
        # A compiled graph uses its buffers again once the operators that read them have run
        flat_grads, flat_x = [grad.clone() for grad in flat_grads], flat_x.clone()
    for grad, (number, index) in zip(flat_grads, named, strict=True):
        store = _STORES[number]
        store.add(store.weight(index), partial(_weight_gradient, grad, flat_x))
    return total.view(x.shape)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """d loss / d W = dY^T X. dY (T, N), X (T, D) -> (N, D)."""
    return grad.t() @ x


@torch.library.custom_op("titan5d::product_gradients", mutates_args=())
def product_gradients(
    grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], keys: Sequence[Tensor]
) -> Tensor:
    """`_gradients` for compiled graphs. Its output is used, so no compiler drops it for having no effect."""
    return _gradients(grads, x, weights, keys, keep_copies=True)


@product_gradients.register_fake
def _(grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape)
