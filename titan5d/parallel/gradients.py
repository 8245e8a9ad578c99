"""One gradient norm over all meshes and stages, one clip factor on all ranks.

What a gradient is, per parameter and mesh axis, is written in the DTensor's placements:

    Shard(d)   this rank holds a slice       -> slices are summed over the axis
    Replicate  every rank holds the whole    -> counted once
    Partial    every rank holds a summand    -> summed into place before anything reads it

Plain tensors are whole on this rank. Pipeline stages hold different parameters and are summed over the pp axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from titan5d.parallel.local_part import local_part, placed


@torch.no_grad()
def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sums gradients that are still partial over a mesh axis, so that each has its parameter's placements.

    They are many and small (norms, routers): all that belong to one group of ranks are summed in one all-reduce.
    """
    together: dict[tuple[dist.ProcessGroup, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if not isinstance(grad, DTensor):
            continue
        axes = [axis for axis, placement in enumerate(grad.placements) if isinstance(placement, Partial)]
        if any(not parameter.placements[axis].is_replicate() for axis in axes):  # type: ignore[attr-defined]
            parameter.grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
            continue
        for axis in axes:
            together.setdefault((grad.device_mesh.get_group(axis), grad.dtype), []).append(parameter)
    for (group, _), alike in together.items():
        summands = [local_part(parameter.grad) for parameter in alike if parameter.grad is not None]
        sums = torch.cat([summand.reshape(-1) for summand in summands])
        dist.all_reduce(sums, group=group)
        for summand, piece in zip(
            summands, sums.split([summand.numel() for summand in summands]), strict=True
        ):
            summand.copy_(piece.view_as(summand))
    for alike in together.values():
        for parameter in alike:
            # summed by now: placed as its parameter
            parameter.grad = placed(local_part(parameter.grad), parameter)  # type: ignore[arg-type]


@torch.no_grad()
def global_norm(
    parameters: Iterable[nn.Parameter], p: float = 2.0, pipeline_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The p-norm (p = 2, inf, ...) of all gradients of the model as one vector: an fp32 scalar, equal on all ranks.

    Partial gradients must have been reduced. Parameters without a gradient count as zero.
    """
    # Sums over shards are additive, so every slice enters its groups' sums once: one all-reduce per kind of sharding.
    by_groups: dict[tuple[str, ...], tuple[list[dist.ProcessGroup], list[torch.Tensor]]] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        grad = parameter.grad
        if grad is None:
            continue
        axes, groups = _sharded_over(grad)
        by_groups.setdefault(axes, (groups, []))[1].append(local_part(grad))
    total = torch.zeros((), dtype=torch.float32, device=device)
    operation = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    # Sorted by axis names, which are the same on all ranks: every rank must run its collectives in one order.
    for key in sorted(by_groups):
        groups, tensors = by_groups[key]
        part = _power_sum(tensors, p, device)
        for group in groups:
            dist.all_reduce(part, operation, group=group)
        total = torch.maximum(total, part) if math.isinf(p) else total + part
    if pipeline_group is not None and pipeline_group.size() > 1:
        dist.all_reduce(total, operation, group=pipeline_group)
    return total if math.isinf(p) else total ** (1.0 / p)


@torch.no_grad()
def clip_by_norm(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scales all gradients by max_norm / norm when norm exceeds max_norm; otherwise does not touch them.

    Reading the norm waits for the device, which a step does in any case before its update.
    """
    if max_norm <= 0 or float(norm) <= max_norm:
        return
    grads = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    factor = max_norm / norm
    for device, dtype in {(grad.device, grad.dtype) for grad in grads}:  # two devices under CPU offload
        alike = [grad for grad in grads if (grad.device, grad.dtype) == (device, dtype)]
        torch._foreach_mul_(alike, factor.to(device, dtype))


def _sharded_over(grad: torch.Tensor) -> tuple[tuple[str, ...], list[dist.ProcessGroup]]:
    """Names and groups of the mesh axes over which the gradient is cut in slices."""
    if not isinstance(grad, DTensor):
        return (), []
    mesh = grad.device_mesh
    names = mesh.mesh_dim_names or ()
    axes = [
        axis
        for axis, placement in enumerate(grad.placements)
        # _StridedShard (FSDP over TP) is a shard too, though not a subclass in every version
        if mesh.size(axis) > 1 and (isinstance(placement, Shard) or hasattr(placement, "split_factor"))
    ]
    return tuple(names[axis] for axis in axes), [mesh.get_group(axis) for axis in axes]


def _power_sum(tensors: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """sum |x|^p over all elements (max |x| for p = inf), an fp32 scalar.

    On the CPU torch adds one element after the other, and in fp32 the norm of 4 M elements is wrong by 1e-4, by how
    much depending on how they are sharded: so short runs are added in fp32, and these in fp64. CUDA adds by blocks.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device=device)
    if math.isinf(p) or device.type != "cpu":
        norms = torch.stack(torch._foreach_norm(tensors, p, dtype=torch.float32))
    else:
        norms = torch.cat([_norms_of_runs(tensor, p) for tensor in tensors]).double()
    return (norms.max() if math.isinf(p) else (norms**p).sum()).float()


RUN = 1024


def _norms_of_runs(tensor: torch.Tensor, p: float) -> torch.Tensor:
    """The p-norm of every RUN elements of `tensor`, and of the rest: (runs,) fp32."""
    flat = tensor.reshape(-1)
    whole = flat.numel() // RUN * RUN
    runs, rest = flat[:whole].view(-1, RUN), flat[None, whole:]  # (n, RUN), (1, what is left)
    parts = [part for part in (runs, rest) if part.numel()]
    return torch.cat([torch.linalg.vector_norm(part, p, dim=1, dtype=torch.float32) for part in parts])
