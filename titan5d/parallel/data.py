"""Cut 1, data: the batch is cut over ranks, and with it the training state (ZeRO-0/1/2/3, HSDP).

          rank 0        rank 1        rank 2        rank 3
    rows  [0 1]         [2 3]         [4 5]         [6 7]         every rank: other rows, the same weights
    state [####]        [####]        [####]        [####]        stage 0: everything on every rank
          [#...]        [.#..]        [..#.]        [...#]        stage 1: optimizer state cut; 2: + gradients;
                                                                  3: + parameters, gathered unit by unit

A unit is what is gathered and reduced together: the embedding, each block, norm + head. Collectives per unit:

    stage 0   one all-reduce a step
    stage 1   one all-gather and one reduce-scatter a step
    stage 2   one all-gather a step, one reduce-scatter a micro-batch
    stage 3   two all-gathers and one reduce-scatter a micro-batch
    HSDP      the same inside a shard group, and one all-reduce of the shards across replicas a step
    routers   whole on every rank in all stages; one all-reduce a step

All stages are torch's FSDP2; they differ in when it may free and when it must reduce. Gradients are summed, never
averaged: the loss is already divided by the token count of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
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
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from titan5d.models.decoder import Decoder


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


def apply_data_parallel(model: Decoder, mesh: DeviceMesh, plan: DataParallel) -> None:
    """Wraps the units of `model` (in place) over `mesh`: one axis, or (replicate, shard) for HSDP.

    For stage 0 the mesh has one axis, all of whose ranks hold everything.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=plan.param_dtype,
        reduce_dtype=plan.reduce_dtype,
        # Activations have the compute type from the embedding on; a cast of all inputs would also hit the rotary
        # tables, which must stay fp32.
        cast_forward_inputs=False,
    )
    routers = _replicate_routers(model, mesh)
    offload = OffloadPolicy()
    if plan.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    wrapped = units(model)
    for index, unit in enumerate(wrapped):
        modules: Any = unit if len(unit) > 1 else unit[0]
        if plan.stage == 0:
            replicate(
                modules, mesh=mesh, mp_policy=precision, offload_policy=offload, ignored_params=routers
            )
            continue
        # The last unit is needed again at once by backward: freeing it would only gather it twice.
        last = index == len(wrapped) - 1 and len(wrapped) > 1
        reshard: bool | int = plan.stage == 3 and not last
        if reshard and plan.reshard_degree is not None:
            reshard = plan.reshard_degree
        fully_shard(
            modules,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=reshard,
            ignored_params=routers,
        )
    if plan.stage == 0:
        replicate(model, mesh=mesh, mp_policy=precision, offload_policy=offload, ignored_params=routers)
    else:
        fully_shard(
            model,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=plan.stage == 3,
            ignored_params=routers,
        )
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        # gloo has no premultiplied sum; a plain sum is what is wanted anyway
        module.set_force_sum_reduction_for_comms(True)
    _prefetch([unit[0] for unit in wrapped])


def _replicate_routers(model: Decoder, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Gives every rank the routers' weights whole, in the type they are stored in, and returns them.

    A router decides by differences that a bf16 copy would not have; it is one row an expert, so keeping it whole costs
    little. Its gradient is a partial sum on each rank, added up once a step (gradients.reduce_partial_gradients).
    """
    for router in model.routers().values():
        weight = distribute_tensor(router.weight.detach(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        router.weight = nn.Parameter(weight)
        router.local_weight = _local_summand
    return {router.weight for router in model.routers().values()}


def _local_summand(weight: torch.Tensor) -> torch.Tensor:
    """A replicated weight as a plain tensor, whose gradient on this rank is a summand."""
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[Partial()] * weight.device_mesh.ndim)


def _prefetch(heads: list[nn.Module]) -> None:
    """Gathers the next unit while this one computes, in both directions."""
    for this, following in pairwise(heads):
        assert isinstance(this, FSDPModule) and isinstance(following, FSDPModule)
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])
    first = heads[0]
    assert isinstance(first, FSDPModule)
    # Nothing is left to gather once the first unit is here. FSDP2, not told, would gather the last unit in vain: the
    # one that ran before this unit in its own list, which goes on over micro-batches.
    first.set_modules_to_backward_prefetch([first])


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every wrapped module; FSDP2's setters are per module."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def before_microbatch(model: nn.Module, stage: int, last: bool) -> None:
    """Tells FSDP2, before each forward, what this micro-batch may free and must reduce.

    `last`: the last micro-batch of the optimizer step. Parameters must be freed in its backward, or the next forward
    would run on what was gathered before the update.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    if stage <= 2:
        model.set_reshard_after_backward(last)  # keep whole parameters across micro-batches
    if stage <= 1:
        model.set_requires_gradient_sync(last)  # keep whole gradients, reduce once a step
    else:
        model.set_requires_all_reduce(last)  # HSDP: shards cross the replicas once a step
