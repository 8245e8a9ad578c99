"""Rotation against complex multiplication; fp32 whatever is done to the model."""

from __future__ import annotations

import pytest
import torch

from titan5d.models.rope import RotaryEmbedding, apply_rotary
from titan5d.models.rope_scaling import YarnScaling

SHAPE = (2, 9, 3, 8)  # (B, S, H, head_dim)


def by_complex_numbers(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """The pair (i, i + head_dim/2) as one complex number, times exp(i position frequency), in fp64."""
    half = x.shape[-1] // 2
    frequency = theta ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    angles = (positions.double()[..., None] * frequency).unsqueeze(2)
    pair = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.exp(1j * angles)
    return torch.cat((pair.real, pair.imag), -1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_equals_complex_rotation_forward_and_backward(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(SHAPE, generator=generator).to(dtype)
    positions = torch.randint(100, SHAPE[:2], generator=generator)
    cos, sin = RotaryEmbedding(8, 10_000.0, None)(positions, SHAPE[1])
    y = apply_rotary(x, cos, sin)
    y.backward(grad)

    wide = x.detach().double().requires_grad_()
    expected = by_complex_numbers(wide, positions, 10_000.0)
    expected.backward(grad.double())
    assert y.dtype == dtype and x.grad is not None and x.grad.dtype == dtype and wide.grad is not None
    assert (y.double() - expected).abs().max() <= tolerance * expected.abs().max()
    assert (x.grad.double() - wide.grad).abs().max() <= tolerance * wide.grad.abs().max()


def test_no_positions_counts_from_zero_in_every_row() -> None:
    rope = RotaryEmbedding(8, 10_000.0, None)
    counted = rope(torch.arange(9).expand(2, 9), 9)
    for one, two in zip(rope(None, 9), counted, strict=True):
        assert one.shape == (1, 9, 1, 8)
        assert torch.equal(one.expand_as(two), two)


def test_yarn_sharpens_scores_at_every_length() -> None:
    scaling = YarnScaling(factor=4.0, original_max_seq_len=64)
    for seq_len in (32, 64, 128):
        cos, sin = RotaryEmbedding(16, 10_000.0, scaling)(None, seq_len)
        length = cos.square() + sin.square()
        torch.testing.assert_close(length, torch.full_like(length, 1.2964770), rtol=1e-6, atol=0)


def test_frequencies_survive_meta_device_and_casts() -> None:
    """Case 031: neither junk after to_empty nor bf16 after a cast of the whole model."""
    expected = RotaryEmbedding(8, 10_000.0, None).inverse_frequencies.clone()
    with torch.device("meta"):
        rope = RotaryEmbedding(8, 10_000.0, None)
    assert rope.inverse_frequencies.is_meta
    rope.to_empty(device="cpu")
    assert torch.equal(rope.inverse_frequencies, expected)
    rope.to(torch.bfloat16)
    assert rope.inverse_frequencies.dtype == torch.float32 and torch.equal(rope.inverse_frequencies, expected)
    rope.inverse_frequencies.fill_(float("nan"))
    rope.init_buffers("cpu")
    assert torch.equal(rope.inverse_frequencies, expected)
    assert list(rope.state_dict()) == []


def test_cast_cosines_are_refused() -> None:
    cos, sin = RotaryEmbedding(8, 10_000.0, None)(None, 9)
    with pytest.raises(TypeError, match=r"cosines are torch.bfloat16.*cast_forward_inputs=False"):
        apply_rotary(torch.zeros(SHAPE), cos.bfloat16(), sin)
