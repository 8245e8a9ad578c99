"""Ring attention: queries stay at home, K and V travel round the ranks that share a row.

Axis sliced: sequence. Collectives: none, only neighbours: forward c - 1 hops of K and V; backward the same hops
again, and the gradients of K and V (fp32) follow their block one step behind and go home from its last stop.

    step        0          1          2          3         rank i at step s holds the K/V of rank i - s
    rank 0    q0 x kv0   q0 x kv3   q0 x kv2   q0 x kv1
    rank 1    q1 x kv1   q1 x kv0   q1 x kv3   q1 x kv2    while it computes with them, they are already on
    rank 2    q2 x kv2   q2 x kv1   q2 x kv0   q2 x kv3    their way to rank i + 1, and those of rank i - s - 1
    rank 3    q3 x kv3   q3 x kv2   q3 x kv1   q3 x kv0    on their way here

Liu et al. 2023, "Ring Attention with Blockwise Transformers"; zig-zag pieces: zigzag.py; which part of each block
is live, and how far each must travel: block_plan.py; the kernels and the merge: attention_blocks.py.

Both directions are custom ops, opaque to the compiler (so a block with ring attention is one graph) and pure
functions of their inputs (so recomputation repeats the same hops on all ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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

Wait = Callable[[], None]


class Exchange(Protocol):
    """Starts point-to-point transfers and returns at once; calling what it returns waits for them.

    `sends` and `receives` pair a tensor with a rank *of the group*. Between any two ranks transfers match in the
    order in which they were started.
    """

    def __call__(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Wait: ...


class PointToPoint:
    """The real exchange. A wait raises after the timeout of the process group.

    With documents some ranks may have nothing to exchange, and NCCL sets a group up at its first use, on all ranks at
    once: let it be set up beforehand (`device_id` of init_process_group, or one barrier).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Wait:
        transfers = [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for x, peer in sends]
        transfers += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for x, peer in receives]
        works = dist.batch_isend_irecv(transfers) if transfers else []

        def wait() -> None:
            for work in works:
                work.wait()
            transfers.clear()  # until here they keep the tensors alive

        return wait


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, exchange: Exchange, kernels: BlockKernels, scale: float
) -> tuple[Tensor, Tensor]:
    """This rank's part of the attention of the whole rows.

    Args:
        q: (B, L, n_heads, head_dim). k, v: (B, L, n_kv_heads, head_dim). L tokens of each row are here.

    Returns:
        out (B, L, n_heads, head_dim) in q's dtype, lse (B, L, n_heads) fp32.
    """
    following, previous = (plan.rank + 1) % plan.degree, (plan.rank - 1) % plan.degree
    kv = torch.stack((k, v))  # (2, B, L, n_kv_heads, head_dim): one message a hop
    result: tuple[Tensor, Tensor] | None = None
    for step in range(plan.degree):
        # 1. Post the transfer of the next block, so that it runs under the computation with this one.
        sends = [(kv, following)] if plan.goes_on(step) else []
        next_kv = k.new_empty((2, *k.shape)) if plan.goes_on_before(step) else k.new_empty(0)
        wait = exchange(sends, [(next_kv, previous)] if plan.goes_on_before(step) else [])
        # 2. Attend to this block and merge.
        block = plan.blocks[step]
        if block is not None:
            result = attend_block(block, q, kv[0], kv[1], result, kernels, scale)
        # 3. Only now wait.
        wait()
        kv = next_kv
    assert result is not None  # the own block is never empty
    return result[0].to(q.dtype), result[1]


def ring_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: RingPlan,
    exchange: Exchange,
    kernels: BlockKernels,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's q and, stacked, of its k and v. Sums are kept in lse's dtype (fp32).

    At step s >= 1 this rank adds its share to the gradients of the K/V it holds and passes the sum on, one step
    behind the K/V themselves: to the next rank or, at the block's last stop, straight to its owner. The order of
    additions is fixed by the ring, so results are the same in every run.
    """
    following, previous = (plan.rank + 1) % plan.degree, (plan.rank - 1) % plan.degree
    kv = torch.stack((k, v))  # (2, B, L, n_kv_heads, head_dim)
    none = torch.empty(0, dtype=lse.dtype, device=q.device)
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    home = none.new_zeros((2, *k.shape))  # dk, dv of the own block, as far as they are made here
    returned = none  # and what all other ranks add to them
    travelling = (
        none  # dk, dv of the block that is here, as far as the ranks before this one have summed them
    )
    wait_gradients: Wait = _nothing
    for step in range(plan.degree):
        sends = [(kv, following)] if plan.goes_on(step) else []
        next_kv = k.new_empty((2, *k.shape)) if plan.goes_on_before(step) else k.new_empty(0)
        wait_kv = exchange(sends, [(next_kv, previous)] if plan.goes_on_before(step) else [])
        block = plan.blocks[step]
        grads = None
        if block is not None:
            grads = block_gradients(block, grad_out, q, kv[0], kv[1], out, lse, kernels, scale)
        wait_gradients()  # posted a step ago, they came in under the computation above
        if step == 1 and plan.is_here(step):
            travelling = torch.zeros_like(home)
        if block is not None and grads is not None:
            sums = home if step == 0 else travelling
            add_gradients(block, grads, dq, sums[0], sums[1])
            del grads
        if step > 0:
            # Pass on the sum that is here; take over the previous rank's, which is at its step >= 1 as well; and
            # receive the own one, if this is the step of the own block's last stop.
            next_stop = following if plan.goes_on(step) else plan.owner(step)
            sends = [(travelling, next_stop)] if plan.is_here(step) else []
            travelling = torch.empty_like(home) if plan.goes_on_before(step) else none
            receives = [(travelling, previous)] if plan.goes_on_before(step) else []
            if step == plan.hops[plan.rank]:
                returned = torch.empty_like(home)
                receives.append((returned, (plan.rank + step) % plan.degree))
            wait_gradients = exchange(sends, receives)
        wait_kv()
        kv = next_kv
    wait_gradients()
    if plan.hops[plan.rank]:
        home += returned
    return dq.to(q.dtype), home.to(k.dtype)


def _nothing() -> None:
    """The wait for transfers that were not needed."""


def _alone(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Wait:
    """The exchange of a ring of one, which has nobody to exchange with."""
    return _nothing


def _ring(
    q: Tensor, documents: Tensor | None, zigzag: bool, group_name: str | None
) -> tuple[RingPlan, Exchange]:
    if group_name is None:
        return plan_ring(SequenceCut(1), 0, q.shape[0], q.shape[1], documents, q.device), _alone
    group = group_named(group_name)
    cut = SequenceCut(group.size(), "headtail" if zigzag else "none")
    return plan_ring(cut, group.rank(), q.shape[0], q.shape[1], documents, q.device), PointToPoint(group)


ring_attention = attention_op("titan5d::ring_attention", _ring, ring_forward, ring_backward)
"""(q, k, v, documents, zigzag, group name, scale) -> (out, lse). Group None: a ring of one, the rows are whole."""


class RingAttention(nn.Module):
    """Takes the place of an attention's `core` when the sequence is cut over `group`."""

    def __init__(self, group: dist.ProcessGroup, load_balancer: LoadBalancer = "headtail") -> None:
        super().__init__()
        self.group_name = group.group_name
        self.zigzag = SequenceCut(group.size(), load_balancer).zigzag

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Causal attention of the whole rows, of which each rank holds a piece.

        Args:
            q: (B, L, n_heads, head_dim); k, v: (B, L, n_kv_heads, head_dim), positions already applied.
            mask: document ids of the whole rows (B, L * degree) from `prepare_documents`; None: one document a row.

        Returns:
            (B, L, n_heads, head_dim).
        """
        return ring_attention(q, k, v, mask, self.zigzag, self.group_name, q.shape[-1] ** -0.5)[0]
