"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): keys and values of all heads from one short vector.

    x --wkv_a--> latent (kv_rank) --norm--wkv_b--> each head's key (nope part) and value
             \\-> key, rope part: one for all heads, rotated
    x --wq_a--> latent (q_rank) --norm--wq_b--> each head's query: nope part, rope part (rotated)      or x --wq-->

    score = (q_nope . k_nope + q_rope . k_rope) * (nope + rope)^-1/2 * YaRN's factor

The rotary elements lie in pairs side by side, as in DeepSeek's checkpoints; they are put into the halves that the
rotation here works on, which changes no score, since queries and keys are reordered alike.

`core` is that of ordinary attention, with as many key heads as query heads. Its kernels take keys and values of one
width, so the values are widened with zeros: (nope + rope) / v_head_dim times the work of the second product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan5d.models.args import ModelArgs
from titan5d.models.attention import SDPACore
from titan5d.models.linear import Linear
from titan5d.models.norm import RMSNorm
from titan5d.models.products import Products
from titan5d.models.rope import apply_rotary
from titan5d.models.rope_scaling import YarnScaling

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside; DeepSeek's code has it fixed, whatever the model's own."""


class LatentAttention(nn.Module):
    """(B, S, dim) -> (B, S, dim). The number of heads is read off the tensors, as in `Attention`."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.nope, self.rope, self.v_dim = args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim
        self.kv_rank = args.kv_lora_rank
        bias, q_dim = args.attention_bias, args.n_heads * args.head_dim
        self.wq: Linear | None = None
        self.wq_a: Linear | None = None
        self.q_norm: RMSNorm | None = None
        self.wq_b: Linear | None = None
        if args.q_lora_rank:
            self.wq_a = Linear(args.dim, args.q_lora_rank, bias=bias)
            self.q_norm = RMSNorm(args.q_lora_rank, LATENT_NORM_EPS)
            self.wq_b = Linear(args.q_lora_rank, q_dim, bias=False)
        else:
            self.wq = Linear(args.dim, q_dim, bias=False)
        self.wkv_a = Linear(args.dim, self.kv_rank + self.rope, bias=bias)
        self.kv_norm = RMSNorm(self.kv_rank, LATENT_NORM_EPS)
        self.wkv_b = Linear(self.kv_rank, args.n_heads * (self.nope + self.v_dim), bias=False)
        self.wo = Linear(args.n_heads * self.v_dim, args.dim, bias=bias)
        self.core: nn.Module = SDPACore()
        self.products = Products()
        # YaRN sharpens the whole score, not the rotated part alone
        scaling = args.rope_scaling
        self.score_factor = scaling.softmax_multiplier if isinstance(scaling, YarnScaling) else 1.0

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, S, dim); cos, sin (B or 1, S, 1, rope) fp32; mask is what `core` takes."""
        q = self._queries(x)  # (B, S, H, nope + rope)
        latent, k_rope = self.wkv_a(x).split((self.kv_rank, self.rope), dim=-1)
        (kv,) = self.products.column(self.kv_norm(latent), (self.wkv_b,))
        batch, seq_len, _ = kv.shape
        kv = kv.view(batch, seq_len, -1, self.nope + self.v_dim)  # (B, S, H, nope + v)
        k_nope, v = kv.split((self.nope, self.v_dim), dim=-1)
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)

        # The factor of the scores goes into the queries: `core` divides by the root of the width, as always.
        factor = self.score_factor
        q_nope = q_nope * factor if factor != 1.0 else q_nope
        q_rope = apply_rotary(_halves(q_rope), cos * factor, sin * factor)
        k_rope = _halves(self.products.shared(k_rope).unsqueeze(2))  # (B, S, 1, rope)
        k_rope = apply_rotary(k_rope, cos, sin)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
        out = self.core(q, k, F.pad(v, (0, k.shape[-1] - self.v_dim)), mask)[..., : self.v_dim]
        return self.products.row(out.reshape(batch, seq_len, -1), self.wo)  # (B, S, H * v) -> (B, S, dim)

    def _queries(self, x: Tensor) -> Tensor:
        if self.wq_a is not None and self.q_norm is not None and self.wq_b is not None:
            (q,) = self.products.column(self.q_norm(self.wq_a(x)), (self.wq_b,))
        else:
            assert self.wq is not None
            (q,) = self.products.column(x, (self.wq,))
        return q.view(*q.shape[:2], -1, self.nope + self.rope)


def _halves(x: Tensor) -> Tensor:
    """(..., 2 n) -> (..., 2 n): x0 x1 x2 x3 ... becomes x0 x2 ... x1 x3 ..."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
