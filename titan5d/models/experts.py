"""The routed experts: E SwiGLU feed-forwards, their matrices stacked, each applied to its own rows.

Two places for the router's weight, equal in value:

    after    sum_e  weight_e * w2_e(silu(w1_e x) * w3_e x)        keeps the outputs (rows, dim) for backward
    before   sum_e  w2_e(weight_e * silu(w1_e x) * w3_e x)        does not: the weight's gradient is made from the
                                                                   hidden vectors, which are computed again
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titan5d.models.feed_forward import swiglu
from titan5d.models.grouped_mm import grouped_mm


class Experts(nn.Module):
    """(N, dim) -> (N, dim), rows sorted by expert; no biases.

    Parameters: w1 (gate) and w3 (values) (n_experts, ffn_dim, dim), w2 (back) (n_experts, dim, ffn_dim).

    Attributes:
        local_weight: a parameter -> the experts of it that are on this device; here all of them.
    """

    def __init__(self, n_experts: int, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, ffn_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, ffn_dim, dim))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=0.02)
        self.local_weight: Callable[[Tensor], Tensor] = _whole

    def forward(self, rows: Tensor, ends: Tensor, has_tail: bool, weights: Tensor | None = None) -> Tensor:
        """
        Args:
            rows: (N, dim), those of expert 0 first.
            ends: (experts here,) int32: where the rows of each end; equal to the one before for an expert without.
            has_tail: whether rows may follow that belong to no expert; they come out as zeros.
            weights: (N,) fp32 to weigh the hidden vectors by; None = not here.
        """
        w1, w2, w3 = (self.local_weight(weight).to(rows.dtype) for weight in (self.w1, self.w2, self.w3))
        gate = grouped_mm(rows, w1, ends, has_tail)  # (N, ffn_dim)
        up = grouped_mm(rows, w3, ends, has_tail)  # (N, ffn_dim)
        hidden = swiglu(gate, up) if weights is None else _WeightedSwiGLU.apply(gate, up, weights)
        return grouped_mm(hidden, w2, ends, has_tail)


def _whole(weight: Tensor) -> Tensor:
    return weight


class _WeightedSwiGLU(torch.autograd.Function):
    """weights[:, None] * silu(gate) * up, rounded once; backward keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        return (F.silu(gate).mul_(up) * weights[:, None]).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weights = ctx.saved_tensors
        activated = F.silu(gate)
        grad_weights = torch.linalg.vecdot((activated * up).to(weights.dtype), grad.to(weights.dtype))
        grad = (grad * weights[:, None]).to(gate.dtype)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, activated.mul_(grad), grad_weights
