"""RMSNorm against its formula in fp64, in fp32 and bf16, forward and backward."""

from __future__ import annotations

import pytest
import torch

from titan5d.models.norm import RMSNorm


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def setup(dtype: torch.dtype) -> tuple[RMSNorm, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(48, 1e-5).to(dtype)
    norm.weight.data.copy_(1 + 0.3 * torch.randn(48, generator=generator))
    x = (3 * torch.randn(2, 17, 48, generator=generator)).to(dtype).requires_grad_()
    grad = torch.randn(2, 17, 48, generator=generator).to(dtype)
    return norm, x, grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_forward_and_backward_equal_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    norm, x, grad = setup(dtype)
    y = norm(x)
    y.backward(grad)
    wide_x = x.detach().double().requires_grad_()
    wide_weight = norm.weight.detach().double().requires_grad_()
    expected = exact(wide_x, wide_weight, 1e-5)
    expected.backward(grad.double())

    assert y.dtype == dtype and x.grad is not None and norm.weight.grad is not None
    for ours, theirs in ((y, expected), (x.grad, wide_x.grad), (norm.weight.grad, wide_weight.grad)):
        assert theirs is not None and ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_bf16_is_the_rounded_fp32_norm() -> None:
    """One rounding, at the end: bitwise what an fp32 norm gives when its result is cast."""
    norm, x, _ = setup(torch.bfloat16)
    expected = exact(x.detach().float(), norm.weight.detach().float(), 1e-5).bfloat16()
    ours = norm(x.detach())
    differing = (ours != expected).float().mean()
    assert differing < 0.002  # fp32 results right at a rounding boundary
    assert (ours.float() - expected.float()).abs().max() <= expected.float().abs().max() * 2**-8


def test_rows_of_zeros_stay_finite() -> None:
    norm, _, _ = setup(torch.float32)
    x = torch.zeros(3, 48, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
