"""SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titan5d.models.linear import Linear
from titan5d.models.products import Products


class FeedForward(nn.Module):
    """(..., dim) -> (..., dim) through two hidden vectors of width ffn_dim.

    w1 makes the gate, w3 the values, w2 goes back; no biases.
    """

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn_dim, bias=False)
        self.w2 = Linear(ffn_dim, dim, bias=False)
        self.w3 = Linear(dim, ffn_dim, bias=False)
        self.products = Products()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.products.column(x, (self.w1, self.w3))
        return self.products.row(swiglu(gate, up), self.w2)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; (..., ffn_dim) each.

    Backward computes silu(gate) again instead of keeping it: a quarter less memory for the feed-forward's
    activations, for one elementwise pass.
    """
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, F.silu(gate).mul_(grad)
