"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467): y = x / sqrt(mean(x^2) + eps) * weight, computed in fp32.

On CUDA this is torch's fused kernel. Elsewhere torch composes it from operators that keep three extra activations for
backward and round twice in bf16; `_RMSNorm` keeps x and one number a row, and rounds once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """Normalises the last dimension. Input and output (..., dim) have the same type.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., dim) / sqrt(mean(x^2) + eps) * weight (dim,), in the type of x."""
    if x.device.type == "cuda":
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        # the norm of a row needs no squared copy of x
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        scale = torch.rsqrt(mean_square + eps)  # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # With s = scale:  dL/dweight = sum over rows of g x s,  dL/dx = s (g w - x s^2 mean(g w x))
        x, weight, scale = ctx.saved_tensors
        dim = x.shape[-1]
        wide, wide_grad, wide_weight = x.float(), grad.float(), weight.float()
        product = wide_grad * wide
        grad_weight = product.reshape(-1, dim).t().mv(scale.reshape(-1))  # (dim, rows), (rows) -> (dim)
        mean = (product @ wide_weight).div_(dim).unsqueeze(-1)  # (..., 1)
        weighted = wide_grad * wide_weight if grad.dtype == torch.float32 else wide_grad.mul_(wide_weight)
        grad_x = weighted.addcmul_(wide, mean.mul_(scale.square()), value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
