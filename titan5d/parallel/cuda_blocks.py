"""The block kernels of attention_blocks.py that need CUDA: FlashAttention-2, in torch or in its own package.

Both take all documents of a block in one call (cumulative lengths), in fp16 or bf16, with GQA inside. Their
log-sum-exps come heads first, (B, n_heads, Lq) or packed (n_heads, T); here it is (B, Lq, n_heads) everywhere.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from titan5d.parallel.block_plan import Spans

aten = torch.ops.aten


class CudaFlash:
    """The FlashAttention-2 kernels inside torch: fp16 and bf16. Documents: one call for all."""

    name = "aten::_flash_attention_forward"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spans: Spans | None
    ) -> tuple[Tensor, Tensor]:
        if spans is None:
            dense = None, None, q.shape[1], k.shape[1]
            out, lse = aten._flash_attention_forward(q, k, v, *dense, 0.0, causal, False, scale=scale)[:2]
            return out, lse.transpose(1, 2)  # (B, n_heads, Lq) -> (B, Lq, n_heads)
        packed = (x.squeeze(0) for x in (q, k, v))  # (T, heads, head_dim)
        lengths = _varlen(spans, q.device)
        out, lse = aten._flash_attention_forward(*packed, *lengths, 0.0, causal, False, scale=scale)[:2]
        return out.unsqueeze(0), lse.t().unsqueeze(0)  # (n_heads, T) -> (1, T, n_heads)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        spans: Spans | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The state of the dropout generator, which without dropout is not looked at.
        unused = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        if spans is None:
            dense = None, None, q.shape[1], k.shape[1]
            saved = out, lse.transpose(1, 2).contiguous()  # (B, n_heads, Lq)
            dq, dk, dv = aten._flash_attention_backward(
                grad_out, q, k, v, *saved, *dense, 0.0, causal, *unused, scale=scale
            )
            return dq, dk, dv
        packed = (x.squeeze(0) for x in (grad_out, q, k, v, out))  # (T, heads, head_dim)
        grads = aten._flash_attention_backward(
            *packed,
            lse.squeeze(0).t().contiguous(),
            *_varlen(spans, q.device),
            0.0,
            causal,
            *unused,
            scale=scale,
        )
        dq, dk, dv = (grad.unsqueeze(0) for grad in grads)
        return dq, dk, dv


class FlashAttnPackage:
    """The kernels of the flash-attn package (2.7 or later): fp16 and bf16. Documents: one call for all."""

    name = "flash_attn"

    def __init__(self) -> None:
        self.kernels: Any = importlib.import_module("flash_attn.flash_attn_interface")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spans: Spans | None
    ) -> tuple[Tensor, Tensor]:
        options = _package_options(causal, scale) | {"return_softmax": False}
        if spans is None:
            out, lse = self.kernels._flash_attn_forward(q, k, v, **options)[:2]
            return out, lse.transpose(1, 2)  # (B, n_heads, Lq) -> (B, Lq, n_heads)
        packed = (x.squeeze(0) for x in (q, k, v))  # (T, heads, head_dim)
        out, lse = self.kernels._flash_attn_varlen_forward(*packed, *_varlen(spans, q.device), **options)[:2]
        return out.unsqueeze(0), lse.t().unsqueeze(0)  # (n_heads, T) -> (1, T, n_heads)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        spans: Spans | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = _package_options(causal, scale)
        options |= {"deterministic": torch.are_deterministic_algorithms_enabled()}
        # The package writes the gradients into contiguous tensors it is given.
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        if spans is None:
            saved = out, lse.transpose(1, 2).contiguous()  # (B, n_heads, Lq)
            self.kernels._flash_attn_backward(grad_out, q, k, v, *saved, dq, dk, dv, **options)
            return dq, dk, dv
        packed = (x.squeeze(0) for x in (grad_out, q, k, v, out))  # (T, heads, head_dim)
        saved_lse = lse.squeeze(0).t().contiguous()  # (n_heads, T)
        self.kernels._flash_attn_varlen_backward(
            *packed, saved_lse, *(x.squeeze(0) for x in (dq, dk, dv)), *_varlen(spans, q.device), **options
        )
        return dq, dk, dv


def _varlen(spans: Spans, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Cumulative lengths of queries and keys (int32, on the device) and the longest of each."""
    longest = [max(b - a for a, b in pairwise(x)) for x in (spans.q, spans.k)]
    q_bounds, k_bounds = (torch.tensor(x, dtype=torch.int32).to(device) for x in (spans.q, spans.k))
    return q_bounds, k_bounds, longest[0], longest[1]


def _package_options(causal: bool, scale: float) -> dict[str, Any]:
    options = {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": causal,
        "softcap": 0.0,
        "alibi_slopes": None,
    }
    return options | {"window_size_left": -1, "window_size_right": -1}
