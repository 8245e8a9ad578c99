"""Makes a pair of functions, attention over a cut row and its backward, one differentiable operator of torch.

An operator is opaque to the compiler: whatever it sends and receives, the transformer block around it stays one
graph (`fullgraph=True`), and activation checkpointing sees one node it can save or recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan5d.parallel.attention_blocks import choose_block_kernels
from titan5d.parallel.block_plan import RingPlan

Prepare = Callable[[Tensor, Tensor | None, bool, str | None], tuple[RingPlan, Any]]
"""(q, documents, zigzag, group_name) -> who computes what, and how tensors get there."""


def attention_op(
    name: str,
    prepare: Prepare,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator `name` ("namespace::name") and, beside it, `name`_backward.

    The operator is (q, k, v, documents, zigzag, group_name, scale) -> (out, lse), where
        q is (B, L, n_heads, head_dim), k and v (B, L, n_kv_heads, head_dim): this rank's piece of each row;
        documents is (B, S) int32 on the host, from `prepare_documents`, or None: every row is one document;
        zigzag says how the rows were cut and group_name over which ranks; scale is the factor on the scores;
        out is shaped as q, lse (B, L, n_heads) in fp32.

    Args:
        prepare: makes plan and transport, first thing in either direction.
        forward: (q, k, v, plan, transport, kernels, scale) -> (out, lse).
        backward: (grad_out, q, k, v, out, lse, plan, transport, kernels, scale) -> (dq, dkv), dkv being dk and dv
            stacked: (2, B, L, n_kv_heads, head_dim).
        Both return new tensors.
    """

    # The annotations are the operators' schema: torch reads them.
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        zigzag: bool,
        group_name: str | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        plan, transport = prepare(q, documents, zigzag, group_name)
        kernels = choose_block_kernels(q.device.type, q.dtype, q.shape[-1])
        return forward(q, k, v, plan, transport, kernels, scale)

    def attend_backward(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        documents: Tensor | None,
        zigzag: bool,
        group_name: str | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        plan, transport = prepare(q, documents, zigzag, group_name)
        kernels = choose_block_kernels(q.device.type, q.dtype, q.shape[-1])
        return backward(grad_out, q, k, v, out, lse, plan, transport, kernels, scale)

    op = torch.library.custom_op(name, attend, mutates_args=())
    gradient_op = torch.library.custom_op(f"{name}_backward", attend_backward, mutates_args=())

    def fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=lse_dtype)

    def gradient_fake(grad_out: Tensor, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty((2, *k.shape))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, documents, *ctx.rest = inputs
        ctx.save_for_backward(q, k, v, *output, documents)

    def differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        # lse is handed out for the backward's sake; nobody differentiates through it.
        *tensors, documents = ctx.saved_tensors
        dq, dkv = gradient_op(grad_out.contiguous(), *tensors, documents, *ctx.rest)
        return dq, dkv[0], dkv[1], None, None, None, None

    op.register_fake(fake)
    gradient_op.register_fake(gradient_fake)
    op.register_autograd(differentiate, setup_context=save)
    return op


def group_named(name: Any) -> dist.ProcessGroup:
    """The process group of that name (`group.group_name`): operators take strings, not groups."""
    return dist.distributed_c10d._resolve_process_group(name)
