"""Context parallelism by exchanging heads for tokens (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509).

Axis sliced: sequence outside attention, heads inside it. Collectives: forward one all-to-all of q, k, v and one of
the output; backward the same two the other way.

    before   rank 0: tokens of piece 0, heads 0 1 2 3        inside   rank 0: all tokens, heads 0 1
             rank 1: tokens of piece 1, heads 0 1 2 3   <->           rank 1: all tokens, heads 2 3

Inside, each rank attends over whole rows, so work is balanced however the rows were cut, and per-document masks are
those of one device. The price: heads must divide, n_heads % degree == 0, and no transfer hides under attention.
With fewer KV heads than ranks (or a number that does not divide) each KV head goes to all ranks whose queries read
it, and its gradients are summed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan5d.parallel.attention_op import group_named
from titan5d.parallel.ring import ring_attention
from titan5d.parallel.zigzag import LoadBalancer, SequenceCut


@torch.library.custom_op("titan5d::tokens_to_heads", mutates_args=())
def tokens_to_heads(x: Tensor, zigzag: bool, group_name: str, degree: int) -> Tensor:
    """(B, S / degree, H, head_dim), all heads -> (B, S, H / degree, head_dim), all tokens in their natural order."""
    outgoing = torch.stack(
        x.chunk(degree, 2)
    )  # (degree, B, S / degree, H / degree, head_dim), by destination
    incoming = torch.empty_like(outgoing)  # by source
    dist.all_to_all_single(incoming, outgoing, group=group_named(group_name))
    return _cut(zigzag, degree).unshard(incoming.unbind(0))


@torch.library.custom_op("titan5d::heads_to_tokens", mutates_args=())
def heads_to_tokens(x: Tensor, zigzag: bool, group_name: str, degree: int) -> Tensor:
    """The inverse: (B, S, H / degree, head_dim) -> (B, S / degree, H, head_dim)."""
    cut = _cut(zigzag, degree)
    outgoing = torch.stack([cut.shard(x, rank) for rank in range(degree)])
    incoming = torch.empty_like(outgoing)  # (degree, B, S / degree, H / degree, head_dim), by source
    dist.all_to_all_single(incoming, outgoing, group=group_named(group_name))
    return torch.cat(incoming.unbind(0), 2)


def _cut(zigzag: bool, degree: int) -> SequenceCut:
    return SequenceCut(degree, "headtail" if zigzag else "none")


@tokens_to_heads.register_fake
def _(x: Tensor, zigzag: bool, group_name: str, degree: int) -> Tensor:
    batch, local_len, heads, head_dim = x.shape
    return x.new_empty(batch, local_len * degree, heads // degree, head_dim)


@heads_to_tokens.register_fake
def _(x: Tensor, zigzag: bool, group_name: str, degree: int) -> Tensor:
    batch, seq_len, heads, head_dim = x.shape
    return x.new_empty(batch, seq_len // degree, heads * degree, head_dim)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.arguments = inputs


def _tokens_to_heads_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return heads_to_tokens(grad, *ctx.arguments), None, None, None


def _heads_to_tokens_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return tokens_to_heads(grad, *ctx.arguments), None, None, None


tokens_to_heads.register_autograd(_tokens_to_heads_gradient, setup_context=_save)
heads_to_tokens.register_autograd(_heads_to_tokens_gradient, setup_context=_save)


class UlyssesAttention(nn.Module):
    """Takes the place of an attention's `core` when the sequence is cut over `group`."""

    def __init__(self, group: dist.ProcessGroup, load_balancer: LoadBalancer = "headtail") -> None:
        super().__init__()
        self.group_name = group.group_name
        self.degree = group.size()
        self.zigzag = SequenceCut(self.degree, load_balancer).zigzag

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Same contract as `RingAttention.forward`. Raises ValueError if the heads do not divide."""
        degree, n_heads, n_kv_heads = self.degree, q.shape[2], k.shape[2]
        if n_heads % degree:
            raise ValueError(
                f"context_parallel_method = 'ulysses' divides the {n_heads} query heads of a rank over"
                f" context_parallel_degree = {degree} ranks, and {n_heads} % {degree} = {n_heads % degree}; use a"
                f" degree that divides {n_heads}, or context_parallel_method = 'ring'"
            )
        copies = degree // math.gcd(degree, n_kv_heads)
        if copies > 1:  # each rank gets the KV heads its query heads read; autograd sums over the copies
            k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
        # One exchange for all three: beside each group of query heads its group of KV heads.
        groups = [
            x.unflatten(2, (degree, -1)) for x in (q, k, v)
        ]  # (B, S / degree, degree, heads / degree, head_dim)
        heads = [x.shape[3] for x in groups]
        fused = torch.cat(groups, 3).flatten(2, 3)
        fused = tokens_to_heads(fused, self.zigzag, self.group_name, degree)
        q, k, v = fused.split(heads, 2)  # (B, S, heads / degree, head_dim)
        out = ring_attention(q, k, v, mask, False, None, q.shape[-1] ** -0.5)[0]
        return heads_to_tokens(out, self.zigzag, self.group_name, degree)
