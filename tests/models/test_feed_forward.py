"""SwiGLU against its formula, and what it keeps for backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titan5d.models.feed_forward import FeedForward, swiglu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_swiglu_equals_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = (2 * torch.randn(3, 5, 16, generator=generator).to(dtype) for _ in range(3))
    gate.requires_grad_()
    up.requires_grad_()
    y = swiglu(gate, up)
    y.backward(grad)
    wide_gate, wide_up = gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()
    expected = F.silu(wide_gate) * wide_up
    expected.backward(grad.double())
    for ours, theirs in ((y, expected), (gate.grad, wide_gate.grad), (up.grad, wide_up.grad)):
        assert ours is not None and theirs is not None and ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_feed_forward_is_w2_of_silu_w1_times_w3() -> None:
    torch.manual_seed(0)
    module, x = FeedForward(8, 24), torch.randn(2, 3, 8)
    expected = module.w2(F.silu(module.w1(x)) * module.w3(x))
    torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-7)


def test_backward_keeps_three_hidden_tensors() -> None:
    """gate, up and their product; the plain formula would keep silu(gate) as a fourth."""
    module, x = FeedForward(8, 24), torch.randn(2, 3, 8)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x).sum()
    assert sum(size for size in kept.values() if size == 2 * 3 * 24) == 3 * (2 * 3 * 24)
