"""Which kernels attend: torch's scaled_dot_product_attention, one of its backends, or the flash-attn package.

    name             documents of packed rows                        needs
    sdpa             a (B, 1, S, S) mask; torch picks a kernel       nothing
    sdpa_math        the same, in plain matrix products              nothing
    sdpa_flash       -                                               whole rows (no mask); CUDA or a CPU
    sdpa_efficient   a mask                                          CUDA
    sdpa_cudnn       a mask                                          CUDA
    flash_attn       cumulative lengths ("varlen"): no work and no   CUDA 8.0, bf16, the package
                     memory for pairs of different documents

A rank that shares its rows with others (context parallelism) attends block by block, by kernels of its own choice.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan5d.models.attention import SDPACore
from titan5d.models.decoder import Decoder

Backend = Literal["sdpa", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flash_attn"]
SDPA_KERNELS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
FLASH_CAPABILITY = (8, 0)


def choose_backend(
    asked: str, capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, installed: bool
) -> tuple[Backend, str]:
    """The backend for `asked`, and why, in words for the log.

    Args:
        asked: a name of the table, or auto: flash_attn where it can run, else sdpa.
        capability: of the CUDA device; None on a CPU.
        installed: whether the flash-attn package is there.
    """
    if asked != "auto":
        return asked, "as model.attention_backend says"  # type: ignore[return-value]
    if capability is None:
        return "sdpa", "the only one for every type on a CPU"
    reasons = []
    if capability < FLASH_CAPABILITY:
        reasons.append(f"CUDA capability {capability[0]}.{capability[1]} is below 8.0")
    if dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"{str(dtype).removeprefix('torch.')} is no 16-bit type")
    if head_dim % 8 or head_dim > 256:
        reasons.append(f"head_dim = {head_dim} is no multiple of 8 up to 256")
    if not installed:
        reasons.append("the flash-attn package is not installed")
    if reasons:
        return "sdpa", f"flash_attn cannot run: {', '.join(reasons)}"
    return "flash_attn", "no work for pairs of different documents"


def set_attention_backend(model: Decoder, backend: Backend) -> None:
    """Gives every attention of `model` (in place) its kernels, and the model the documents in their form."""
    if backend == "sdpa":
        return
    for block in model.layers.values():
        attention: Any = block.attention
        attention.core = FlashAttnCore() if backend == "flash_attn" else ChosenSDPACore(SDPA_KERNELS[backend])
    if backend == "flash_attn":
        model.prepare_mask = cumulative_lengths


class ChosenSDPACore(SDPACore):
    """`SDPACore` with one of torch's backends. Raises RuntimeError where that one cannot run."""

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        with sdpa_kernel([self.backend]):
            return super().forward(q, k, v, mask)


class FlashAttnCore(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v, causal, inside documents, by the flash-attn package (2.7 or later)."""

    def __init__(self) -> None:
        super().__init__()
        package = importlib.import_module("flash_attn")
        self.dense: Any = package.flash_attn_func
        self.packed: Any = package.flash_attn_varlen_func

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q (B, S, Hq, head_dim), k and v (B, S, Hkv, head_dim), mask of `cumulative_lengths`; returns q's shape."""
        if mask is None:
            return self.dense(q, k, v, causal=True)
        batch, seq_len = q.shape[:2]
        rows = (x.flatten(0, 1) for x in (q, k, v))  # (B * S, heads, head_dim)
        out = self.packed(
            *rows,
            cu_seqlens_q=mask,
            cu_seqlens_k=mask,
            # an upper bound, equal in every step: the true maximum would be a new number, and graph, each time
            max_seqlen_q=seq_len,
            max_seqlen_k=seq_len,
            causal=True,
        )
        return out.unflatten(0, (batch, seq_len))  # (B, S, Hq, head_dim)


def cumulative_lengths(document_ids: Tensor | None) -> Tensor | None:
    """Where documents begin in the rows laid end to end, and where the last one ends: (documents + 1,) int32.

    Args:
        document_ids: (B, S) integers, equal within a document; None when each row is one document.

    A document ends with its row. How many there are is data: on CUDA the host waits for it, once a micro-batch.
    """
    if document_ids is None:
        return None
    starts = torch.ones_like(document_ids, dtype=torch.bool)  # (B, S)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = starts.flatten().nonzero().flatten()  # (documents,)
    end = begins.new_full((1,), document_ids.numel())
    lengths = torch.cat((begins, end)).to(torch.int32)
    # compiled blocks take any number of documents from the first step on
    torch._dynamo.mark_dynamic(lengths, 0)
    return lengths
