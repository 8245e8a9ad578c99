"""Muon: momentum whose step is made orthogonal, for the hidden matrices; everything else is stepped by AdamW.

Keller Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; the scale of the step is
Moonshot's (arXiv:2502.16982, eq. 4), which gives it AdamW's RMS, so that one `lr` and one `weight_decay` serve both.

    B <- mu B + (1 - mu) G                      momentum
    U  = mu B + (1 - mu) G                      Nesterov's look ahead
    W <- (1 - lr wd) W - lr 0.2 sqrt(max(rows, columns)) orthogonal(U)

`orthogonal` needs the whole matrix, while a rank holds a slice of it. `torch.optim.Muon` on sharded parameters runs
its products on the slices: some thirty collectives a matrix, and an update that depends on the cut (by 2 to 6 % in
bf16). Here n matrices at a time go round the n ranks that share them; each is made orthogonal once, by one of them:

    rank 0   slices of A, B   --all-gather-->  A     --orthogonal-->  A'     --broadcast-->  its slices of A', B'
    rank 1   slices of A, B   --all-gather-->     B  --orthogonal-->     B'  --broadcast-->  its slices of A', B'

That costs one all-gather and one broadcast a matrix, in the type of the products; the products are shared out over
the ranks; and every cut makes, for equal gradients, bitwise the update of one device. Replicas share the work
likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim.adamw import adamw

from titan5d.parallel.local_part import local_part, placed
from titan5d.train.adam import placed_gradient

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Jordan's quintic: steep at zero, and after five rounds every singular value is near 1 (0.7 to 1.2)."""


def orthogonal(matrix: Tensor, rounds: int = 5) -> Tensor:
    """The orthogonal matrix nearest to `matrix` (rows, columns), roughly: U V^T of its U S V^T, without an SVD.

    Each round is X <- a X + (b A + c A A) X with A = X X^T, in the type of `matrix`. Zero stays zero.
    """
    a, b, c = NEWTON_SCHULZ
    # Of the two Gram matrices A is the smaller one.
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(rounds):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.size(0) <= matrix.size(1) else x.T


def orthogonal_stack(update: Tensor) -> Tensor:
    """`orthogonal` of a matrix (rows, columns), or of each in a stack of experts (experts, rows, columns)."""
    if update.ndim == 2:
        return orthogonal(update)
    result = torch.empty_like(update)
    for index in range(update.size(0)):
        result[index] = orthogonal(update[index])
    return result


class Muon(torch.optim.Optimizer):
    """Groups with `orthogonalize = True` hold matrices (rows, columns) or stacks of them; the others are AdamW's.

    Parameters are plain tensors or DTensors of any placement. All ranks of a parameter's mesh must step together.

    Args:
        params: groups, each with its own `orthogonalize` and `weight_decay`.
        momentum: mu above.
        dtype: type of the products inside `orthogonal`. bf16 is what the method was made for, and turns a gradient's
            last bit into near one percent of the update; fp32 keeps it at some 1e-6, for runs that compute in fp32.
        foreach, fused: torch's implementation of the AdamW half.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        momentum: float,
        dtype: torch.dtype = torch.bfloat16,
        foreach: bool = False,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, {**defaults, "orthogonalize": False})
        self.dtype = dtype
        self.foreach = foreach
        self.fused = fused
        for group in self.param_groups:
            shapes = [tuple(param.shape) for param in group["params"]] if group["orthogonalize"] else []
            if wrong := [shape for shape in shapes if len(shape) not in (2, 3)]:
                raise ValueError(
                    f"Muon steps matrices and stacks of matrices, not parameters of shape {wrong}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure: a step has one gradient")
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["orthogonalize"]:
                self._step_matrices(group, params)
            elif params:
                self._step_adamw(group, params)

    def _step_adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                device = param.device if self.fused else torch.device("cpu")
                self.state[param]["step"] = torch.zeros((), dtype=torch.float32, device=device)
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        adamw(
            [local_part(param) for param in params],
            [local_part(placed_gradient(param)) for param in params],
            [local_part(self.state[param]["exp_avg"]) for param in params],
            [local_part(self.state[param]["exp_avg_sq"]) for param in params],
            [],
            [self.state[param]["step"] for param in params],
            foreach=self.foreach,
            fused=self.fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_matrices(self, group: dict[str, Any], params: list[Tensor]) -> None:
        layouts: dict[Any, list[Tensor]] = {}
        for param in params:
            layout = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
            layouts.setdefault((param.ndim, layout), []).append(param)
        for same_layout in layouts.values():
            ranks = _count_copies(same_layout[0])
            # Matrices of one shape side by side, so that the ranks of a round have equal work.
            ordered = sorted(same_layout, key=lambda param: tuple(param.shape))
            for first in range(0, len(ordered), ranks):
                self._step_round(group, ordered[first : first + ranks])

    def _step_round(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Steps one matrix per rank: gathers all of them, makes one orthogonal here, broadcasts each from its owner."""
        mine = None
        for index, param in enumerate(params):
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
            gradient = placed_gradient(param)
            state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(state["momentum_buffer"], group["momentum"])
            whole = _gather(update, self.dtype)
            if index == _my_index(param):
                mine = whole
        result = None if mine is None else orthogonal_stack(mine)
        for index, param in enumerate(params):
            update = _spread(param, result if index == _my_index(param) else None, index, self.dtype)
            rows, columns = param.shape[-2:]
            param.mul_(1 - group["lr"] * group["weight_decay"])
            local = param.to_local() if isinstance(param, DTensor) else param
            local.add_(update, alpha=-group["lr"] * 0.2 * sqrt(max(rows, columns)))


def _gathered(param: DTensor) -> list[Placement]:
    """The placements under which a rank holds whole matrices: shards of the stack (experts) stay where they are."""
    return [
        placement if not placement.is_replicate() and _shard_dim(placement) < param.ndim - 2 else Replicate()
        for placement in param.placements
    ]


def _shard_dim(placement: Placement) -> int:
    return int(placement.dim)  # type: ignore[attr-defined]  # every sharding placement has one


def _copies(param: DTensor) -> tuple[DeviceMesh, list[int]]:
    """The mesh, and those of its dimensions along which the gathered parameter is the same on every rank."""
    return param.device_mesh, [
        dim for dim, placement in enumerate(_gathered(param)) if placement.is_replicate()
    ]


def _count_copies(param: Tensor) -> int:
    """Over how many ranks the work on the parameters of this layout is shared out."""
    if not isinstance(param, DTensor):
        return 1
    mesh, dims = _copies(param)
    return prod(mesh.size(dim) for dim in dims)


def _my_index(param: Tensor) -> int:
    """This rank's place among those that share the work."""
    if not isinstance(param, DTensor):
        return 0
    mesh, dims = _copies(param)
    index = 0
    for dim in dims:
        index = index * mesh.size(dim) + mesh.get_local_rank(dim)
    return index


def _gather(update: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole matrix in `dtype`, on the device where the mesh communicates. One all-gather per sharding dimension."""
    if not isinstance(update, DTensor):
        return update.to(dtype)
    local = update.to_local().to(update.device_mesh.device_type, dtype)
    return placed(local, update).redistribute(placements=_gathered(update)).to_local()


def _spread(param: Tensor, result: Tensor | None, owner: int, dtype: torch.dtype) -> Tensor:
    """This rank's slice of the matrix that rank number `owner` of those that share the work holds as `result`.

    One broadcast per mesh dimension: first along the owner's line, then along all lines that cross it, and so on.
    """
    if not isinstance(param, DTensor):
        assert result is not None
        return result
    mesh, dims = _copies(param)
    place: dict[int, int] = {}
    for dim in reversed(dims):
        owner, place[dim] = divmod(owner, mesh.size(dim))
    gathered = _gathered(param)
    whole = torch.empty(_local_shape(param, gathered), dtype=dtype, device=mesh.device_type)
    if result is not None:
        whole.copy_(result)  # contiguous, as collectives ask; a transposed result is not
    for position, dim in enumerate(dims):
        if mesh.size(dim) > 1 and all(
            mesh.get_local_rank(later) == place[later] for later in dims[position + 1 :]
        ):
            dist.broadcast(whole, group=mesh.get_group(dim), group_src=place[dim])
    copies = placed(whole, param, gathered)
    return copies.redistribute(placements=param.placements).to_local().to(param.device)


def _local_shape(param: DTensor, gathered: list[Placement]) -> list[int]:
    """Shape of the gathered parameter on this rank: whole matrices, and this rank's share of a stack."""
    local = param.to_local().shape
    sharded = {_shard_dim(placement) for placement in gathered if not placement.is_replicate()}
    return [local[dim] if dim in sharded else param.shape[dim] for dim in range(param.ndim)]
