"""Recompute (activation checkpointing): what forward keeps for backward, and what it computes again.

    none       keeps everything a block's backward reads
    full       keeps the block's input only; backward runs its forward again
    selective  `op`: keeps the outputs of matrix products (dear to compute), recomputes attention, norms, SwiGLU,
               rotary embedding (cheap per byte); a number n: recomputes every n-th block whole, keeps the others.
               A block's last product is neither: nothing in backward reads its output, so recomputing ends before it
    memory_budget  compiled blocks: the compiler keeps the given share of the bytes, choosing by cost

The block keeps its name and its place; only its `forward` is replaced, so parameter names never change.
Whatever is recomputed runs with the random numbers of the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan5d.config.schema_execution import ActivationCheckpoint
from titan5d.models.decoder import Decoder
from titan5d.models.grouped_mm import grouped_mm
from titan5d.models.moe import MoE
from titan5d.parallel.tensor_products import gather_products, product_sum

Shape = tuple[int, ...]
aten = torch.ops.aten
MATRIX_PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.linear.default,
    aten.bmm.default,
    aten._scaled_mm.default,
    gather_products._opoverload,
    grouped_mm._opoverload,
    product_sum._opoverload,
)
"""What selective recompute keeps by default."""
CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
"""Kept where a compiled block has DTensors on the CPU. To recompute it, torch 2.13 saves a generator state (attention
is marked random, for its dropout) behind the DTensors' mesh, where its own runtime does not look for it, and fails."""


def apply_recompute(
    model: Decoder, config: ActivationCheckpoint, compiled: bool = False, experts_are_cut: bool = False
) -> None:
    """Replaces the forward of every block (in place) as `config.mode` says.

    Args:
        compiled: the blocks will be compiled,
        experts_are_cut: but those with experts only in parts, and with a unit of FSDP2 inside.
    """
    if config.mode == "none":
        return
    if config.mode == "memory_budget":
        import torch._functorch.config as compiler

        # read by the compiler when it partitions a block's graph; check.py asks for compile.enable
        compiler.activation_memory_budget = config.memory_budget
        compiler.visualize_memory_budget_pareto = config.visualize_memory_budget_pareto
        return
    every = 1
    kept_ops: tuple[Any, ...] = ()
    if config.mode == "selective":
        if config.selective_ac_option == "op":
            kept_ops = MATRIX_PRODUCTS
        else:
            every = int(config.selective_ac_option)
    for index, block in enumerate(model.layers.values()):
        if index % every:
            continue
        in_parts = experts_are_cut and isinstance(block.feed_forward, MoE)
        one_graph = compiled and not in_parts
        kept = (*kept_ops, CPU_ATTENTION) if one_graph and _has_cpu_dtensors(block) else kept_ops
        context_fn = None
        if kept:
            skip = _weight_shapes(block, config.per_op_sac_force_recompute_mm_shapes_by_fqns)
            if config.early_stop:
                skip |= _last_product(block)
            policy = partial(_keep, kept=kept, skip=skip)
            context_fn = partial(create_selective_checkpoint_contexts, policy)
            if in_parts:
                context_fn = partial(_contexts_around_hooks, policy, kept)
        block.forward = _checkpointed(block.forward, config, context_fn)


def _checkpointed(
    forward: Callable[..., Any], config: ActivationCheckpoint, context_fn: Callable[..., Any] | None
) -> Callable[..., Any]:
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": config.preserve_rng_state,
        "determinism_check": config.determinism_check,
        "early_stop": config.early_stop,
        "debug": config.debug,
    }
    if context_fn is not None:
        options["context_fn"] = context_fn
    return lambda *args, **kwargs: checkpoint(forward, *args, **options, **kwargs)


def _keep(
    context: Any, op: Any, *args: Any, kept: tuple[Any, ...], skip: frozenset[Shape], **kwargs: Any
) -> CheckpointPolicy:
    if op not in kept:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if not skip.isdisjoint(_weights_of(op, args)):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _contexts_around_hooks(
    policy: Callable[..., CheckpointPolicy], kept: tuple[Any, ...]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of torch for forward and recomputing, for a block in which there is a unit of FSDP2 (experts).

    Its hooks run other operators the second time, when the weights are there already, and torch takes operators that
    forward did not run for an error.
    """
    forward, recomputing = create_selective_checkpoint_contexts(policy)
    return forward, _OnlyKept(recomputing, kept)


class _OnlyKept(TorchDispatchMode):
    """Hands the operators whose results may have been kept to `mode`, and runs all others."""

    def __init__(self, mode: Any, kept: tuple[Any, ...]) -> None:
        super().__init__()
        self.mode, self.kept = mode, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled parts of the block run beneath it, and are computed again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.kept:
            return self.mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _has_cpu_dtensors(block: nn.Module) -> bool:
    return any(isinstance(p, DTensor) and p.device_mesh.device_type == "cpu" for p in block.parameters())


def _weights_of(op: Any, args: tuple[Any, ...]) -> list[Shape]:
    """(out, in) of the weights of a matrix product. Operators see no names: shapes are all there is to tell them by."""
    if op is aten.addmm.default:
        return [tuple(args[2].shape[::-1])]
    if op in (aten.mm.default, aten._scaled_mm.default):
        return [tuple(args[1].shape[::-1])]
    if op in (aten.linear.default, product_sum._opoverload):
        return [tuple(args[1].shape)]
    return [tuple(weight.shape) for weight in args[1]] if op is gather_products._opoverload else []


def _weight_shapes(block: nn.Module, names: list[str]) -> frozenset[Shape]:
    """(out, in) of the weights on this rank of the linears whose names end in one of `names`."""
    return frozenset(
        shape for name, shape in _linears(block) if any(name.endswith(wanted) for wanted in names)
    )


def _last_product(block: nn.Module) -> frozenset[Shape]:
    """The shape of a dense block's last weight, if no other weight of the block has it."""
    others = {shape for name, shape in _linears(block) if name != "feed_forward.w2"}
    return _weight_shapes(block, ["feed_forward.w2"]) - others


def _linears(block: nn.Module) -> Iterator[tuple[str, Shape]]:
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            yield name, tuple((weight.to_local() if isinstance(weight, DTensor) else weight).shape)
