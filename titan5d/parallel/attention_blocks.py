"""Attention of some queries to one block of keys, with its log-sum-exp, so that blocks can be merged.

softmax over all keys is not needed at once: from each block b keep the output o_b and the log-sum-exp l_b of its
scores, and the whole is the average of the o_b weighted by exp(l_b) (online softmax, Milakov and Gimelshein 2018;
blocks over ranks: Ring Attention, Liu et al. 2023). The backward of a block needs only the *whole* row's output
and log-sum-exp, so it can be done block by block too (FlashAttention-2, Dao 2023, algorithm 2).

No collectives here. All kernels share one interface: tensors are (B, L, heads, head_dim), log-sum-exps (B, L,
heads) in fp32, K and V have their own, fewer heads (GQA) and are never expanded to the queries' heads.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from titan5d.parallel.block_plan import Block, Spans
from titan5d.parallel.cuda_blocks import CudaFlash, FlashAttnPackage

aten = torch.ops.aten


class BlockKernels(Protocol):
    """Forward and backward of one block."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spans: Spans | None
    ) -> tuple[Tensor, Tensor]:
        """Attention inside the block.

        Args:
            q: (B, Lq, n_heads, head_dim). k, v: (B, Lk, n_kv_heads, head_dim).
            causal: query l meets keys 0..l; only with Lq == Lk (or equal spans).
            scale: factor on the scores.
            spans: None, or with B == 1 the documents that are packed in the one row; none of them is empty.

        Returns:
            out (B, Lq, n_heads, head_dim) in q's dtype and lse (B, Lq, n_heads), fp32 (fp64 for fp64).
        """
        ...

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
        """The block's share of dq, dk, dv, shaped as q, k, v.

        `out` and `lse` are those of the *whole* attention of these queries, over all blocks.
        """
        ...


def merge_block_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Joins, in place, what queries got from the blocks so far with what they got from one more.

        out' = (exp(lse) out + exp(block_lse) block_out) / (exp(lse) + exp(block_lse))
             = out + sigmoid(block_lse - lse) (block_out - out)

    Neither the sigmoid nor logaddexp can overflow, whatever the scores. Shapes as in BlockKernels; out is fp32 too.
    """
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


def attend_block(
    block: Block,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    so_far: tuple[Tensor, Tensor] | None,
    kernels: BlockKernels,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attends to one K/V block and merges it with the blocks before it.

    Args:
        q: (B, L, n_heads, head_dim). k, v: (B, L, n_kv_heads, head_dim).
        so_far: what this function returned for the blocks before; it is changed in place. None: this is the first,
            which must be the own block (there each query meets at least itself).

    Returns:
        out (B, L, n_heads, head_dim) and lse (B, L, n_heads), both fp32 (fp64 for fp64) and contiguous.
    """
    block_out, block_lse = kernels.forward(
        block.q.take(q), block.k.take(k), block.k.take(v), block.causal, scale, block.spans
    )
    if so_far is None:
        out = block_out.to(block_lse.dtype).reshape(q.shape).contiguous()
        return out, block_lse.reshape(q.shape[:-1]).contiguous()
    out, lse = so_far
    out_rows, lse_rows = block.q.take(out), block.q.take(lse)
    merge_block_(out_rows, lse_rows, block_out, block_lse)
    block.q.give_back(out, out_rows)
    block.q.give_back(lse, lse_rows)
    return out, lse


def block_gradients(
    block: Block,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kernels: BlockKernels,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's share of dq, dk, dv, for the rows in it. `out`, `lse`: of all blocks."""
    return kernels.backward(
        block.q.take(grad_out),
        block.q.take(q),
        block.k.take(k),
        block.k.take(v),
        block.q.take(out),
        block.q.take(lse),
        block.causal,
        scale,
        block.spans,
    )


def add_gradients(
    block: Block, grads: tuple[Tensor, Tensor, Tensor], dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Adds what `block_gradients` returned to the sums dq, dk, dv (fp32, contiguous, shaped as q, k, v)."""
    block.q.add(dq, grads[0])
    block.k.add(dk, grads[1])
    block.k.add(dv, grads[2])


class CpuFlash:
    """torch's tiled CPU kernel (any dtype, GQA inside). Documents: one call each."""

    name = "aten::_scaled_dot_product_flash_attention_for_cpu"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spans: Spans | None
    ) -> tuple[Tensor, Tensor]:
        if spans is None:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, L, head_dim)
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                *heads_first, 0.0, causal, scale=scale
            )
            return out.transpose(1, 2), lse.transpose(1, 2)
        parts = [
            self.forward(q_part, k_part, v_part, causal, scale, None)
            for q_part, k_part, v_part in zip(
                _split(q, spans.q), _split(k, spans.k), _split(v, spans.k), strict=True
            )
        ]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)

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
        if spans is None:
            heads_first = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))  # (B, heads, L, head_dim)
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *heads_first, lse.transpose(1, 2).contiguous(), 0.0, causal, scale=scale
            )
            dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
            return dq, dk, dv
        by_query = (_split(x, spans.q) for x in (grad_out, q, out, lse))
        by_key = (_split(x, spans.k) for x in (k, v))
        parts = [
            self.backward(grad_part, q_part, k_part, v_part, out_part, lse_part, causal, scale, None)
            for grad_part, q_part, out_part, lse_part, k_part, v_part in zip(*by_query, *by_key, strict=True)
        ]
        dq, dk, dv = (torch.cat(grads, 1) for grads in zip(*parts, strict=True))
        return dq, dk, dv


class PlainMath:
    """Matrix products in plain torch, for devices and dtypes without a fused kernel (such as fp32 on CUDA).

    Scores are made for at most `rows` queries at a time.
    """

    name = "plain torch (no fused attention kernel for this device, dtype or head_dim)"

    def __init__(self, rows: int = 1024) -> None:
        self.rows = rows

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spans: Spans | None
    ) -> tuple[Tensor, Tensor]:
        compute = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=compute, device=q.device)
        for q_rows, k_rows in self._tiles(q, k, causal, spans):
            q_tile, k_tile, v_tile = _grouped(q[:, q_rows], k[:, k_rows], v[:, k_rows], compute)
            scores = _scores(q_tile, k_tile, causal, scale)  # (B, n_kv, group, lq, lk)
            tile_lse = scores.logsumexp(-1)
            probabilities = (scores - tile_lse.unsqueeze(-1)).exp()
            out[:, q_rows] = (
                torch.einsum("bngqk,bnkd->bqngd", probabilities, v_tile).flatten(2, 3).to(q.dtype)
            )
            lse[:, q_rows] = tile_lse.permute(0, 3, 1, 2).flatten(2)  # (B, lq, n_heads)
        return out, lse

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
        compute = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros(x.shape, dtype=compute, device=x.device) for x in (q, k, v))
        delta = (grad_out.to(compute) * out.to(compute)).sum(-1)  # (B, Lq, n_heads)
        for q_rows, k_rows in self._tiles(q, k, causal, spans):
            q_tile, k_tile, v_tile = _grouped(q[:, q_rows], k[:, k_rows], v[:, k_rows], compute)
            grad_tile = _grouped(grad_out[:, q_rows], k[:, k_rows], v[:, k_rows], compute)[0]
            groups = q_tile.shape[1:3]
            scores = _scores(q_tile, k_tile, causal, scale)
            tile_lse, tile_delta = (
                x[:, q_rows].unflatten(2, groups).permute(0, 2, 3, 1).unsqueeze(-1) for x in (lse, delta)
            )  # (B, n_kv, group, lq, 1)
            probabilities = (scores - tile_lse).exp()
            grad_scores = torch.einsum("bngqd,bnkd->bngqk", grad_tile, v_tile) - tile_delta
            grad_scores = grad_scores * probabilities * scale
            dq[:, q_rows] = torch.einsum("bngqk,bnkd->bqngd", grad_scores, k_tile).flatten(2, 3)
            dk[:, k_rows] += torch.einsum("bngqk,bngqd->bknd", grad_scores, q_tile)
            dv[:, k_rows] += torch.einsum("bngqk,bngqd->bknd", probabilities, grad_tile)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _tiles(self, q: Tensor, k: Tensor, causal: bool, spans: Spans | None) -> list[tuple[slice, slice]]:
        """Pieces of at most `rows` queries with the keys they can meet."""
        spans = spans or Spans([0, q.shape[1]], [0, k.shape[1]])
        tiles = []
        for n in range(len(spans.q) - 1):
            for start in range(spans.q[n], spans.q[n + 1], self.rows):
                stop = min(start + self.rows, spans.q[n + 1])
                keys = spans.k[n] + stop - spans.q[n] if causal else spans.k[n + 1]
                tiles.append((slice(start, stop), slice(spans.k[n], keys)))
        return tiles


@lru_cache(maxsize=32)
def choose_block_kernels(device_type: str, dtype: torch.dtype, head_dim: int) -> BlockKernels:
    """The kernels for tensors of this kind, chosen at the first call. `.name` is for the log.

    CUDA takes the flash-attn package when it is installed, else torch's own FlashAttention-2; both want fp16 or
    bf16, a head_dim that is a multiple of 8 up to 256, and compute capability 8.0. The rest is plain torch.
    """
    if device_type == "cpu":
        return CpuFlash()
    half = dtype in (torch.float16, torch.bfloat16)
    fused = device_type == "cuda" and half and head_dim % 8 == 0 and head_dim <= 256
    if not fused or torch.cuda.get_device_capability() < (8, 0):
        return PlainMath()
    return FlashAttnPackage() if importlib.util.find_spec("flash_attn") else CudaFlash()


def _split(x: Tensor, bounds: list[int]) -> tuple[Tensor, ...]:
    """(1, T, ...) -> one (1, l, ...) view per span."""
    return x.split([stop - start for start, stop in pairwise(bounds)], 1)


def _grouped(q: Tensor, k: Tensor, v: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q -> (B, n_kv, group, Lq, head_dim); k, v -> (B, n_kv, Lk, head_dim). Query head h reads KV head h // group."""
    n_kv = k.shape[2]
    q = q.unflatten(2, (n_kv, q.shape[2] // n_kv)).permute(0, 2, 3, 1, 4)
    return q.to(compute), k.transpose(1, 2).to(compute), v.transpose(1, 2).to(compute)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Grouped q against k -> (B, n_kv, group, Lq, Lk)."""
    scores = torch.einsum("bngqd,bnkd->bngqk", q, k) * scale
    if causal:  # the tile's last query meets all its keys: the diagonal ends in the lower right corner
        dead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores.masked_fill_(dead.triu(1 + k.shape[2] - q.shape[3]), float("-inf"))
    return scores
