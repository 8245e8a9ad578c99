"""Gradient audit: after backward and reduction, is every gradient what its placements say? (debug.audit_gradients)

Two questions, per parameter and mesh axis:

    replicated   do all ranks of the axis hold the same gradient?
                     largest - smallest over the axis, element by element
    summed       is it the sum of what the ranks made?
                     what autograd gave each rank, summed once more by plain all-reduces, against what FSDP2,
                     ReplicaSum and reduce_partial_gradients left in `parameter.grad`

                 rank 0     rank 1        FSDP2, tensor ...       plain all-reduces
    autograd     g0         g1        ->  slices of g0 + g1   =?  slices of g0 + g1

The first finds a reduction that is missing, the second also a factor that is wrong. Copies of a tied matrix on two
pipeline stages are asked the first. Not asked the second: those copies, and weights whose gradients a split backward
makes (they never pass through autograd).

It costs a copy of all gradients before reduction, whole and in fp32, and three all-reduces a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from titan5d.models.decoder import Decoder
from titan5d.parallel.data import fsdp_modules
from titan5d.parallel.local_part import local_part
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline import PipelineModel
from titan5d.parallel.replicas import ReplicaSum

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Of the largest element: what the order of additions changes, in the type a gradient is made or kept in."""


class GradientAuditFailed(RuntimeError):
    """A gradient is not what it is declared to be. Raised on all ranks alike, with everything that was found."""


@dataclass
class _Made:
    """What autograd made of one parameter on this rank, before any reduction: the sum over micro-batches."""

    local: Tensor  # zeros until a gradient comes
    mesh: (
        DeviceMesh | None
    )  # of the parameter as the model computes with it; without the axes FSDP2 shards over
    partial: bool = False
    dtype: torch.dtype = torch.float32


class GradientAudit:
    """Watches the gradients of `model`, which must have its weights. Building and checking it is collective."""

    def __init__(self, model: Decoder, meshes: Meshes) -> None:
        self.model, self.meshes = model, meshes
        self._made: dict[str, _Made] = {}
        sharded = dict(model.named_parameters())
        for module in fsdp_modules(model):
            module.unshard()
            gathered = {
                name: parameter
                for name, parameter in model.named_parameters()
                if parameter is not sharded[name]
            }
            self._watch(gathered)
            module.reshard()
        self._watch({name: p for name, p in sharded.items() if name not in self._made})

    def _watch(self, parameters: dict[str, nn.Parameter]) -> None:
        later = _made_outside_of_autograd(self.model)
        for name, parameter in parameters.items():
            # norm and head are one unit of two modules: gathered together, seen twice
            if name in later or name in self._made or not parameter.requires_grad:
                continue
            shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            self._made[name] = _Made(torch.zeros(shape, device=parameter.device), mesh)
            parameter.register_hook(partial(self._add, name))

    def _add(self, name: str, gradient: Tensor) -> None:
        made = self._made[name]
        if isinstance(gradient, DTensor):
            made.partial |= any(isinstance(placement, Partial) for placement in gradient.placements)
            gradient = gradient.to_local()
        made.dtype = gradient.dtype
        made.local += gradient.detach().float()

    @torch.no_grad()
    def check(self) -> None:
        """Compares the gradients of one step, after their reduction and before they are clipped.

        Raises GradientAuditFailed naming parameters, axes, ranks and differences.
        """
        partials, copies = self._partial_anywhere(), _copies(self.model)
        tied = {"tok_embeddings.weight", "output.weight"} if self._tied_over_stages() else set()
        problems = []
        for name, parameter in self.model.named_parameters():
            mesh = copies.get(parameter)
            problems += _replicas(name, parameter, mesh)
            if name in self._made and name not in tied:
                problems += _sum(name, parameter, self._made[name], name in partials, mesh)
        problems += self._tied_copies() if tied else []
        for made in self._made.values():
            made.local.zero_()
            made.partial = False
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, problems)
        if everything := sorted({problem for rank in found for problem in rank}):
            raise GradientAuditFailed("\n".join(["gradient audit (debug.audit_gradients):", *everything]))

    def _partial_anywhere(self) -> set[str]:
        """Names whose gradient was a summand on any rank: all must take part in its sum."""
        mine = {name for name, made in self._made.items() if made.partial}
        found: list[set[str]] = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, mine)
        return set().union(*found)

    def _tied_over_stages(self) -> bool:
        return self.model.args.tie_embeddings and self.meshes.topology.pp > 1

    def _tied_copies(self) -> list[str]:
        """Embedding and head on the ends of a pipeline: two copies of one matrix, so of one gradient, bit by bit."""
        mine = {
            name: _bits(local_part(parameter.grad))
            for name, parameter in self.model.named_parameters()
            if name in ("tok_embeddings.weight", "output.weight") and parameter.grad is not None
        }
        group = self.meshes.group("pp")
        found: list[dict[str, int]] = [{} for _ in range(group.size())]
        dist.all_gather_object(found, mine, group=group)
        copies = {
            (name, rank): bits
            for rank, copy in zip(dist.get_process_group_ranks(group), found, strict=True)
            for name, bits in copy.items()
        }
        if len(copies) == 2 and len(set(copies.values())) == 1:
            return []
        where = " and ".join(f"{name} on rank {rank}" for name, rank in copies)
        return [f"  tied matrix over axis pp: the gradients of {where} are not bitwise equal copies"]


def _copies(model: Decoder) -> dict[nn.Parameter, DeviceMesh]:
    """Whole parameters and the ranks that hold copies of them; their placements do not say so (replicas.py)."""
    stages = model.stages.values() if isinstance(model, PipelineModel) else [model]
    sums = [stage.gradient_sum for stage in stages]
    return {p: mesh for each in sums if isinstance(each, ReplicaSum) for p, mesh in each.copies()}


def _replicas(name: str, parameter: nn.Parameter, copies: DeviceMesh | None) -> list[str]:
    """Differences over the axes on which the gradient is declared replicated, or is still a summand."""
    grad, problems = parameter.grad, []
    axes: list[tuple[DeviceMesh, int, Any]] = [] if copies is None else [(copies, 0, Replicate())]
    if isinstance(parameter, DTensor):
        placements = grad.placements if isinstance(grad, DTensor) else parameter.placements
        axes += [(parameter.device_mesh, axis, placement) for axis, placement in enumerate(placements)]
    local = torch.zeros_like(local_part(parameter)) if grad is None else local_part(grad)
    for mesh, axis, placement in axes:
        if mesh.size(axis) == 1:
            continue
        group = mesh.get_group(axis)
        where = f"  {name} on axis {_axis(mesh, axis)} (ranks {_ranks(group)})"
        if isinstance(placement, Partial):
            problems.append(f"{where}: still a partial sum, the ranks' gradients were not added")
        elif isinstance(placement, Replicate):
            difference = _spread(local, group)
            if difference is not None:
                problems.append(f"{where}: declared replicated, but {difference}")
    return problems


def _spread(local: Tensor, group: dist.ProcessGroup) -> str | None:
    """How `local` differs over the group, in words; None = by rounding at most."""
    wide = torch.nan_to_num(local.float())
    most, least = wide.clone(), wide.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    gap = (most - least).flatten()
    if not gap.numel():
        return None
    place, scale = int(gap.argmax()), torch.maximum(most.abs(), least.abs()).max()
    relative = float(gap[place] / scale.clamp(min=1e-30))
    if relative <= TOLERANCE[local.dtype]:
        return None
    values = [torch.empty_like(wide.flatten()[:1]) for _ in range(group.size())]
    dist.all_gather(values, wide.flatten()[place : place + 1].contiguous(), group=group)
    ranks = dist.get_process_group_ranks(group)
    shown = ", ".join(f"{float(value):.6g} on rank {rank}" for rank, value in zip(ranks, values, strict=True))
    return f"differs by {relative:.1e} of its largest element (element {place}: {shown})"


def _sum(
    name: str, parameter: nn.Parameter, made: _Made, is_partial: bool, copies: DeviceMesh | None
) -> list[str]:
    """Whether `parameter.grad` is this rank's part of the sum of what all ranks made."""
    total = made.local.double()
    axes = []
    if is_partial and made.mesh is not None:
        for axis in range(made.mesh.ndim):
            dist.all_reduce(total, group=made.mesh.get_group(axis))
            axes.append(_axis(made.mesh, axis))
    if copies is not None:
        dist.all_reduce(total, group=copies.get_group())
        axes.append(_axis(copies, 0))
    for axis, placement in _data_axes(parameter, made.mesh):
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        group = mesh.get_group(axis)
        dist.all_reduce(total, group=group)
        axes.append(_axis(mesh, axis))
        if not isinstance(placement, Replicate):
            pieces = total.chunk(group.size(), placement.dim)
            missing = total.narrow(placement.dim, 0, 0)  # more ranks than rows
            total = pieces[group.rank()] if group.rank() < len(pieces) else missing
    if parameter.grad is None:
        return [f"  {name} on rank {dist.get_rank()}: no gradient"] if total.abs().sum() > 0 else []
    left = local_part(parameter.grad).double()
    gap = (left - total).abs().flatten()
    if not axes or not gap.numel() or not bool(torch.isfinite(total).all()):
        return []
    place, relative = int(gap.argmax()), float(gap.max() / total.abs().max().clamp(min=1e-30))
    if relative <= max(TOLERANCE[parameter.grad.dtype], TOLERANCE[made.dtype]):
        return []
    numbers = f"sum {float(total.flatten()[place]):.6g}, gradient {float(left.flatten()[place]):.6g}"
    return [
        f"  {name} over axis {' x '.join(axes)}, rank {dist.get_rank()}: not the sum of what the ranks made, off by"
        f" {relative:.1e} of its largest element (element {place}: {numbers})"
    ]


def _data_axes(parameter: nn.Parameter, computed: DeviceMesh | None) -> Iterator[tuple[int, Any]]:
    """(axis, placement) of the axes that FSDP2 added to the mesh the model computes on."""
    if not isinstance(parameter, DTensor):
        return
    known = () if computed is None else computed.mesh_dim_names or ()
    for axis, name in enumerate(parameter.device_mesh.mesh_dim_names or ()):
        if name not in known and parameter.device_mesh.size(axis) > 1:
            yield axis, parameter.placements[axis]


def _made_outside_of_autograd(model: nn.Module) -> set[str]:
    """Weights of layers that a split backward works off (deferred_weights.py)."""
    return {f"{name}.weight" for name, module in model.named_modules() if hasattr(module, "gradient_key")}


def _bits(tensor: Tensor) -> int:
    """A number that tells tensors apart by the bits of every element and their order."""
    words = tensor.contiguous().view(torch.uint8).flatten().long()
    weights = torch.arange(1, words.numel() + 1, device=words.device) * 2654435761
    return int(((words + 1) * weights).sum())


def _axis(mesh: DeviceMesh, axis: int) -> str:
    return (mesh.mesh_dim_names or ())[axis]


def _ranks(group: dist.ProcessGroup) -> str:
    ranks: Iterable[int] = dist.get_process_group_ranks(group)
    return ", ".join(map(str, ranks))
