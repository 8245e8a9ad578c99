"""Cut 1, data: the batch is cut over ranks, and with it the training state (ZeRO-0/1/2/3, HSDP).

          rank 0        rank 1        rank 2        rank 3
    rows  [0 1]         [2 3]         [4 5]         [6 7]         every rank: other rows, the same weights
    state [####]        [####]        [####]        [####]        stage 0: everything on every rank
          [#...]        [.#..]        [..#.]        [...#]        stage 1: optimizer state cut; 2: + gradients;
                                                                  3: + parameters, gathered unit by unit

A unit is what is gathered and reduced together: the embedding, each block, norm + head. Collectives per unit:

    stage 0   one all-reduce a step (replicas.py)
    stage 1   one all-gather and one reduce-scatter a step
    stage 2   one all-gather a step, one reduce-scatter a micro-batch
    stage 3   two all-gathers and one reduce-scatter a micro-batch
    HSDP      the same inside a shard group, and one all-reduce of the shards across replicas a step
    experts   where they are cut, units of their own, each shared by the ranks that hold the same ones (expert.py)
    routers   no part of any unit: whole on every rank; one all-reduce a step

Stages 1 to 3 are torch's FSDP2; they differ in when it may free and when it must reduce. Where there are no shards,
in stage 0 or on one rank, nothing is gathered: the model computes with the weights themselves, rounding them to its
type. (But many micro-batches under way in a pipeline, or tensor ranks, use one rounded copy, which FSDP2 holds.)
Gradients are summed, never averaged: the loss is already divided by the token count of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from titan5d.models.decoder import Decoder
from titan5d.models.experts import Experts
from titan5d.parallel.gloo_reduce_scatter import GlooReduceScatter
from titan5d.parallel.replicas import ReplicaSum, Unit


@dataclass(frozen=True)
class DataParallel:
    """How the batch axis is executed.

    Attributes:
        stage: ZeRO stage 0..3.
        reshard_degree: stage 3 only: after forward, shards of 1/reshard_degree stay on each rank (None = all ranks).
        param_dtype: type in which parameters are gathered and the model computes.
        reduce_dtype: type in which gradients are summed.
        cpu_offload: keep the sharded state in CPU memory.
    """

    stage: int = 3
    reshard_degree: int | None = None
    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    cpu_offload: bool = False


def units(model: Decoder) -> list[list[nn.Module]]:
    """The modules gathered together, in the order of the forward pass. Missing parts (pipeline stages) are left out.

    A tied embedding and head share one tensor, so they are one unit together with the norm.
    """
    ends: list[nn.Module] = [module for module in (model.norm, model.output) if module is not None]
    blocks: list[list[nn.Module]] = [[block] for block in model.layers.values()]
    last = [ends] if ends else []
    if model.tok_embeddings is None:
        return blocks + last
    if model.output is not None and model.output.weight is model.tok_embeddings.weight:
        return [[model.tok_embeddings, *ends], *blocks]
    return [[model.tok_embeddings], *blocks, *last]


def apply_data_parallel(
    model: Decoder,
    mesh: DeviceMesh,
    plan: DataParallel,
    expert_mesh: DeviceMesh | None = None,
    rounds_once: bool = False,
) -> None:
    """Cuts the units of `model` (in place) over `mesh`: one axis, or (replicate, shard) for HSDP.

    For stage 0 the mesh has one axis, all of whose ranks hold everything.

    Args:
        expert_mesh: the ranks that hold the same experts, likewise; None = the experts are parts of their blocks.
        rounds_once: weights that are stored wider than the model computes are rounded once a step, and that copy kept.
    """
    is_mixed = plan.param_dtype != next(model.parameters()).dtype
    rounds = rounds_once and is_mixed
    cuts_experts = expert_mesh is not None and (rounds or _has_shards(expert_mesh, plan))
    # FSDP2's units share a root, the model: if some are cut, the others are units too, of one shard each
    cuts_rest = rounds or _has_shards(mesh, plan) or cuts_experts
    routers: list[nn.Module] = list(model.routers().values())  # each rank has them whole; expert.py sums
    whole: list[Unit] = []
    for unit in units(model):
        experts = [] if expert_mesh is None else _experts_of(unit)
        if not cuts_rest:
            whole += _copies(unit, mesh, [*experts, *routers])
        if expert_mesh is not None and not cuts_experts:
            whole += _copies(experts, expert_mesh, [])
    if cuts_rest:
        _shard(model, mesh, plan, expert_mesh, cuts_experts)
    else:
        model.compute_dtype = plan.param_dtype if is_mixed else None
    if whole:
        model.gradient_sum = ReplicaSum(whole, plan.reduce_dtype)


def _has_shards(mesh: DeviceMesh, plan: DataParallel) -> bool:
    """Whether FSDP2 has something to do on `mesh`: shards to gather, or weights to fetch from the host."""
    return plan.cpu_offload or (plan.stage > 0 and mesh.size(mesh.ndim - 1) > 1)


def _copies(modules: list[nn.Module], mesh: DeviceMesh, without: list[nn.Module]) -> list[Unit]:
    """The unit of `modules` for the sum over their copies on `mesh`; none if there is one copy."""
    names = mesh.mesh_dim_names or ()
    axes = [name for axis, name in enumerate(names) if mesh.size(axis) > 1]
    if not modules or not axes:
        return []
    (axis,) = axes
    return [Unit(modules, mesh if mesh.ndim == 1 else mesh[axis], without)]


def _shard(
    model: Decoder, mesh: DeviceMesh, plan: DataParallel, expert_mesh: DeviceMesh | None, cuts_experts: bool
) -> None:
    """Wraps the units of `model` in FSDP2: all but the routers and, unless `cuts_experts`, experts that have a mesh of
    their own."""
    ignored = {router.weight for router in model.routers().values()}
    wrapped = units(model)
    heads: list[list[nn.Module]] = []
    for index, unit in enumerate(wrapped):
        # The last unit is needed again at once by backward: freeing it would only gather it twice.
        frees = plan.stage == 3 and not (index == len(wrapped) - 1 and len(wrapped) > 1)
        inner = [] if expert_mesh is None else _experts_of(unit)
        if not cuts_experts:
            ignored |= {parameter for experts in inner for parameter in experts.parameters()}
            inner = []
        for experts in inner:
            assert expert_mesh is not None
            # freed whole: torch makes the groups of larger shards with all ranks, and these have meshes of their own
            _wrap(experts, expert_mesh, plan, frees, ignored)
        _wrap(unit if len(unit) > 1 else unit[0], mesh, plan, _reshard(plan, mesh, frees), ignored)
        heads.append([unit[0], *inner])
    _wrap(model, mesh, plan, plan.stage == 3, ignored)
    over_gloo = mesh.device_type == "cpu" and dist.get_backend(mesh.get_group(mesh.ndim - 1)) == "gloo"
    scatter: Any = GlooReduceScatter()
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        # gloo has no premultiplied sum; a plain sum is what is wanted anyway
        module.set_force_sum_reduction_for_comms(True)
        if over_gloo:
            module.set_custom_reduce_scatter(scatter)
    _prefetch(heads)


def _experts_of(unit: list[nn.Module]) -> list[nn.Module]:
    return [module for part in unit for module in part.modules() if isinstance(module, Experts)]


def _reshard(plan: DataParallel, mesh: DeviceMesh, frees: bool) -> bool | int:
    """What FSDP2 does with whole parameters after forward: keep them (False), free them, or keep larger shards."""
    shards, degree = mesh.size(mesh.ndim - 1), plan.reshard_degree
    if not frees or degree is None or shards % degree or shards == degree:
        return frees
    return degree


def _wrap(
    modules: Any, mesh: DeviceMesh, plan: DataParallel, reshard: bool | int, ignored: set[nn.Parameter]
) -> None:
    common: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            # Activations have the compute type from the embedding on; a cast of all inputs would also hit the rotary
            # tables, which must stay fp32.
            cast_forward_inputs=False,
        ),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if plan.cpu_offload else OffloadPolicy()
        ),
        "ignored_params": ignored,
    }
    if plan.stage == 0:
        replicate(modules, **common)
        return
    cut = partial(_sliced_dimension, shards=mesh.size(mesh.ndim - 1))
    fully_shard(modules, reshard_after_forward=reshard, shard_placement_fn=cut, **common)


def _sliced_dimension(parameter: nn.Parameter, shards: int) -> Shard:
    """The first, by rows. A stack of experts that does not divide over the shards (fewer experts, say) another one that
    does: slices of each expert, as padding of whole experts would cost much. One that is cut already comes last."""
    here = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    if len(here) != 3 or here[0] % shards == 0:
        return Shard(0)
    cut = (
        [p.dim for p in parameter.placements if isinstance(p, Shard)]
        if isinstance(parameter, DTensor)
        else []
    )
    fitting = [dim for dim in sorted((1, 2), key=cut.__contains__) if here[dim] % shards == 0]
    return Shard(fitting[0] if fitting else 0)


def _prefetch(heads: list[list[nn.Module]]) -> None:
    """Gathers the next unit while this one computes, in both directions.

    Args:
        heads: of each unit in order the module that is wrapped, and the wrapped modules inside.
    """
    wrapped: list[list[FSDPModule]] = [[m for m in unit if isinstance(m, FSDPModule)] for unit in heads]
    for this, following in pairwise(wrapped):
        this[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(this)
    # Nothing is left to gather once the first unit is here. FSDP2, not told, would gather the last unit in vain: the
    # one that ran before this unit in its own list, which goes on over micro-batches.
    first = wrapped[0][0]
    first.set_modules_to_backward_prefetch([first])
    for _, *inner in wrapped:
        for experts in inner:  # the unit around them asked for the next one already
            experts.set_modules_to_backward_prefetch([experts])


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every wrapped module; FSDP2's setters are per module."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def before_microbatch(model: Decoder, stage: int, last: bool) -> None:
    """Says, before each forward, what this micro-batch may free and must reduce.

    `last`: the last micro-batch of the optimizer step. Parameters must be freed in its backward, or the next forward
    would run on what was gathered before the update.
    """
    model.gradient_sum.begin_backward(last)
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    if stage <= 2:
        model.set_reshard_after_backward(last)  # keep whole parameters across micro-batches
    if stage <= 1:
        model.set_requires_gradient_sync(last)  # keep whole gradients, reduce once a step
    else:
        model.set_requires_all_reduce(last)  # HSDP: shards cross the replicas once a step
