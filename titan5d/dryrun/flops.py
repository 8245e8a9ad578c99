"""Counts the FLOPs of a step's matrix products and attention, operator by operator, as this rank runs them.

A multiply-add is 2 FLOPs. Causal attention counts the pairs inside the mask, its backward twice its forward (what a
fused kernel computes again inside is left out): the conventions of metrics/flops.py, whose closed forms are the sums of
these counts over all ranks. With a mask given as a tensor every pair counts, as the kernel computes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward

_WHOLE_PRODUCTS = (aten.linear, aten.matmul)
"""Taken apart by autograd, which the bodies of our own operators run beneath."""


class FlopCount(TorchDispatchMode):
    """Counts inside its `with` block.

    Attributes:
        products: FLOPs of matrix products, the experts' included.
        attention: of attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attention = 0

    @property
    def total(self) -> int:
        return self.products + self.attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor comes back with its local tensors
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet is _FORWARD:
            q, k, v, *rest = args
            self.attention += 2 * _pairs(q, k, rest, kwargs) * (q.shape[-1] + v.shape[-1])
        elif packet is _BACKWARD:
            _, q, k, v, _, _, *rest = args
            self.attention += 4 * _pairs(q, k, rest, kwargs) * (q.shape[-1] + v.shape[-1])
        elif packet in _WHOLE_PRODUCTS:
            self.products += 2 * out.numel() * args[0].shape[-1]
        elif packet is aten.addmm_:
            self.products += 2 * out.numel() * args[1].shape[-1]
        elif packet in flop_registry:
            self.products += flop_registry[packet](*args, **kwargs, out_val=out)
        return out


def _pairs(q: torch.Tensor, k: torch.Tensor, rest: list[Any], kwargs: dict[str, Any]) -> int:
    """(query, key) pairs of all heads; q (B, heads, Sq, head_dim), k (B, heads, Sk, head_dim).

    Args:
        rest: dropout_p, is_causal, as far as they were given by place.
    """
    causal = kwargs.get("is_causal", rest[1] if len(rest) > 1 else False)
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return pairs // 2 if causal else pairs
