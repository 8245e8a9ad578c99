"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in the half-rotation layout of Hugging Face's Llama.

Element i of a head is paired with element i + head_dim/2; the pair turns by position * frequency[i]:

    first'  = first * cos - second * sin
    second' = second * cos + first * sin

Angles, cosines and sines are always fp32: bf16 cannot tell position 257 from 258. They are made once per forward of
the model and shared by all blocks, so there is no table whose length would bound the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titan5d.models.rope_scaling import RopeScaling, plain_frequencies


class RotaryEmbedding(nn.Module):
    """Positions -> cosines and sines.

    The frequencies are a buffer that is not saved. They are computed anew, in fp32, whenever the module is moved, cast
    or given memory (`to`, `to_empty`), so they can be neither junk nor bf16.

    Args:
        head_dim: width of a head, even.
        theta: base of the frequencies.
        scaling: stretches them to long contexts.
    """

    inverse_frequencies: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        if scaling is None:
            self._values, self._attention_factor = plain_frequencies(head_dim, theta), 1.0
        else:
            self._values, self._attention_factor = (
                scaling.frequencies(head_dim, theta),
                scaling.attention_factor,
            )
        self.register_buffer(
            "inverse_frequencies", torch.tensor(self._values, dtype=torch.float32), persistent=False
        )

    def init_buffers(self, device: torch.device | str) -> None:
        """Computes the frequencies (head_dim / 2,) fp32 on `device`."""
        self.inverse_frequencies = torch.tensor(self._values, dtype=torch.float32, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        self.init_buffers(self.inverse_frequencies.device)
        return self

    def forward(self, positions: Tensor | None, seq_len: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (B, S, 1, head_dim) fp32; the second half of a head repeats the first.

        Args:
            positions: (B, S) integers; None counts 0..seq_len-1 in every row (B is then 1).
        """
        if positions is None:
            positions = torch.arange(seq_len, device=self.inverse_frequencies.device)[None]  # (1, S)
        angles = positions.float().unsqueeze(-1) * self.inverse_frequencies  # (B, S, head_dim / 2)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)  # (B, S, 1, head_dim)
        cos, sin = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cos, sin = cos * self._attention_factor, sin * self._attention_factor
        return cos, sin


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the heads x (B, S, H, head_dim) by the angles of `RotaryEmbedding`; keeps the type of x.

    Raises TypeError when the cosines were cast below fp32 on their way.
    """
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise TypeError(
            f"rotary cosines are {cos.dtype} and sines {sin.dtype}, but they must stay torch.float32: something cast"
            " the inputs of a block (for FSDP2, set cast_forward_inputs=False)"
        )
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """Written out so that backward keeps nothing but the shared cosines and sines, and no half is copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None  # the transpose of a rotation turns back


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    wide = x if x.device.type == "cuda" else x.float()  # CUDA widens in its kernels, the CPU by a copy each time
    turned = wide * cos  # (B, S, H, head_dim)
    first, second = wide.chunk(2, dim=-1)
    to_first, to_second = turned.chunk(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2]
    to_first.addcmul_(second, sin, value=-direction)
    to_second.addcmul_(first, sin, value=direction)
    return turned.to(x.dtype)
