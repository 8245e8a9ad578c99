"""Context parallelism by gathering K and V: queries stay at home, everybody gets all keys.

Axis sliced: sequence. Collectives: forward one all-gather of K and V; backward the same all-gather again (the
gathered copy is not kept) and one reduce-scatter of their gradients in fp32. (Llama 3, arXiv 2407.21783, 3.3.2.)

    rank 0    q0 x kv0 (own, while the gather runs)   then  q0 x kv3, kv2, kv1
    rank 1    q1 x kv1                                then  q1 x kv0, kv3, kv2

One large message instead of c - 1 small ones, which is better where latency counts; but the K and V of the whole
row are held at once, and only the own block's computation hides the transfer. The blocks, the kernels and the
merge are those of the ring. When no document crosses a cut, nothing is gathered.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan5d.parallel.attention_blocks import (
    BlockKernels,
    add_gradients,
    attend_block,
    block_gradients,
)
from titan5d.parallel.attention_op import attention_op, group_named
from titan5d.parallel.block_plan import RingPlan, plan_ring
from titan5d.parallel.zigzag import LoadBalancer, SequenceCut

# torch 2.13 renamed these two.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def allgather_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RingPlan,
    group: dist.ProcessGroup,
    kernels: BlockKernels,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """This rank's part of the attention of the whole rows. Shapes as in `ring_forward`."""
    gathered, gather = _start_gather(k, v, plan, group)
    result: tuple[Tensor, Tensor] | None = None
    for step, block in enumerate(plan.blocks):
        if step == 1 and gather is not None:
            gather.wait()
        if block is not None:
            block_k, block_v = (k, v) if step == 0 else gathered[plan.owner(step)]
            result = attend_block(block, q, block_k, block_v, result, kernels, scale)
    assert result is not None  # the own block is never empty
    return result[0].to(q.dtype), result[1]


def allgather_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: RingPlan,
    group: dist.ProcessGroup,
    kernels: BlockKernels,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's q and, stacked, of its k and v. Shapes as in `ring_backward`."""
    gathered, gather = _start_gather(k, v, plan, group)
    held = plan.degree if any(plan.hops) else 1
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    dkv = torch.zeros((held, 2, *k.shape), dtype=lse.dtype, device=k.device)  # by owner
    for step, block in enumerate(plan.blocks):
        if step == 1 and gather is not None:
            gather.wait()
        if block is not None:
            block_k, block_v = (k, v) if step == 0 else gathered[plan.owner(step)]
            grads = block_gradients(block, grad_out, q, block_k, block_v, out, lse, kernels, scale)
            dk, dv = dkv[plan.owner(step) if held > 1 else 0]
            add_gradients(block, grads, dq, dk, dv)
    own = dkv[0]  # (2, B, L, n_kv_heads, head_dim)
    if held > 1:
        own = torch.empty_like(own)
        _reduce_scatter(own, dkv.flatten(0, 1), group=group)
    return dq.to(q.dtype), own.to(k.dtype)


def _start_gather(
    k: Tensor, v: Tensor, plan: RingPlan, group: dist.ProcessGroup
) -> tuple[Tensor, dist.Work | None]:
    """K and V of all ranks, by owner (degree, 2, B, L, n_kv_heads, head_dim), and what to wait for first."""
    if not any(plan.hops):
        return k.new_empty(0), None
    gathered = k.new_empty((plan.degree, 2, *k.shape))
    return gathered, _all_gather(gathered.flatten(0, 1), torch.stack((k, v)), group=group, async_op=True)


def _plan(
    q: Tensor, documents: Tensor | None, zigzag: bool, group_name: str | None
) -> tuple[RingPlan, dist.ProcessGroup]:
    group = group_named(group_name)
    cut = SequenceCut(group.size(), "headtail" if zigzag else "none")
    return plan_ring(cut, group.rank(), q.shape[0], q.shape[1], documents, q.device), group


allgather_attention = attention_op(
    "titan5d::allgather_attention", _plan, allgather_forward, allgather_backward
)
"""(q, k, v, documents, zigzag, group name, scale) -> (out, lse)."""


class AllGatherAttention(nn.Module):
    """Takes the place of an attention's `core` when the sequence is cut over `group`."""

    def __init__(self, group: dist.ProcessGroup, load_balancer: LoadBalancer = "headtail") -> None:
        super().__init__()
        self.group_name = group.group_name
        self.zigzag = SequenceCut(group.size(), load_balancer).zigzag

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Same contract as `RingAttention.forward`."""
        return allgather_attention(q, k, v, mask, self.zigzag, self.group_name, q.shape[-1] ** -0.5)[0]
