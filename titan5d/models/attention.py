"""Causal grouped-query attention, inside documents when rows are packed.

The attention proper is `core`, a submodule without parameters: context parallelism and other kernels take its place.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from titan5d.models.linear import Linear
from titan5d.models.norm import RMSNorm
from titan5d.models.products import Products
from titan5d.models.rope import apply_rotary


def document_causal_mask(document_ids: Tensor | None) -> Tensor | None:
    """Which key each query may see: keys of its own document that are not behind it.

    Args:
        document_ids: (B, S) integers, equal within a document; None when each row is one document.

    Returns:
        (B, 1, S, S) bool, True = visible, [b, 0, query, key]; None stands for plain causal attention.
    """
    if document_ids is None:
        return None
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]  # (B, 1, S, S)
    return same.tril_()


class SDPACore(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v by torch's scaled_dot_product_attention; K and V are never expanded."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q (B, S, Hq, head_dim), k and v (B, S, Hkv, head_dim), mask of `document_causal_mask`; returns q's shape."""
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),  # (B, Hq, S, head_dim)
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)  # (B, S, Hq, head_dim)


class Attention(nn.Module):
    """Projections, rotation, attention, projection: (B, S, dim) -> (B, S, dim).

    Head counts are read off the tensors, so a device that holds some of the heads runs the same code.

    Args:
        dim: width of the residual stream.
        n_heads, n_kv_heads: query heads and key/value heads.
        head_dim: width of a head.
        bias: biases in all four projections.
        qk_norm_eps: normalise each query and key head with this epsilon; None = not at all.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(dim, n_heads * head_dim, bias=bias)
        self.wk = Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wv = Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wo = Linear(n_heads * head_dim, dim, bias=bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.core: nn.Module = SDPACore()
        self.products = Products()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, S, dim); cos, sin (B or 1, S, 1, head_dim) fp32; mask is what `core` takes."""
        q, k, v = self.products.column(x, (self.wq, self.wk, self.wv))
        batch, seq_len, _ = q.shape
        q = q.view(batch, seq_len, -1, self.head_dim)  # (B, S, Hq, head_dim)
        k = k.view(batch, seq_len, -1, self.head_dim)  # (B, S, Hkv, head_dim)
        v = v.view(batch, seq_len, -1, self.head_dim)  # (B, S, Hkv, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = self.core(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, mask)
        return self.products.row(
            out.reshape(batch, seq_len, -1), self.wo
        )  # (B, S, Hq * head_dim) -> (B, S, dim)
