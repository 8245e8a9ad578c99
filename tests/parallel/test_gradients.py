"""One norm over any mix of meshes and placements, against the norm of the gathered gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from titan5d.launch.local_ranks import run_ranks
from titan5d.parallel.gradients import clip_by_norm, global_norm, reduce_partial_gradients


def _parameter(grad: torch.Tensor, mesh, placements: list[Placement]) -> nn.Parameter:
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(grad), mesh, placements, src_data_rank=None))
    parameter.grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
    return parameter


def _mixed_meshes(p: float) -> tuple[float, float, list[float]]:
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(size, generator=generator) for size in ((8, 6), (5, 3), (7,), (3, 4), (2, 2))]
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    parameters = [
        _parameter(whole[0], square, [Shard(0), Shard(1)]),
        _parameter(whole[1], line, [Shard(0)]),  # uneven, and empty on the last rank
        _parameter(whole[2], square, [Shard(0), Replicate()]),
        nn.Parameter(torch.zeros(3, 4)),
        nn.Parameter(torch.zeros(9)),  # no gradient at all
        _parameter(whole[4], square, [Replicate(), Replicate()]),
    ]
    parameters[3].grad = whole[3].clone()
    norm = global_norm(parameters, p)
    clip_by_norm(parameters, norm, 0.5)
    clipped = [
        g.full_tensor() if hasattr(g, "full_tensor") else g
        for g in (q.grad for q in parameters)
        if g is not None
    ]
    after = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in clipped]), p))
    return float(norm), after, [float(g.abs().sum()) for g in clipped]


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_norm_and_clip_over_mixed_meshes_equal_one_vector(p: float) -> None:
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(size, generator=generator) for size in ((8, 6), (5, 3), (7,), (3, 4), (2, 2))]
    expected = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in whole]), p))
    results = run_ranks(_mixed_meshes, 4, p)
    for norm, after, _ in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert after == pytest.approx(0.5, rel=1e-6)
    assert len({norm for norm, _, _ in results}) == 1


def _partial() -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    from torch.distributed.tensor import DTensor

    parameter.grad = DTensor.from_local(torch.full((3,), float(dist.get_rank() + 1)), mesh, [Partial()])
    reduce_partial_gradients([parameter])
    assert torch.equal(parameter.grad.to_local(), torch.full((3,), 3.0))  # 1 + 2
    return float(global_norm([parameter]))


def test_partial_gradients_are_summed_and_counted_once() -> None:
    assert run_ranks(_partial, 2) == pytest.approx([math.sqrt(27.0)] * 2)


def _stages() -> tuple[float, float]:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([3.0 if dist.get_rank() == 0 else -4.0])
    group = dist.group.WORLD
    return float(global_norm([parameter], 2.0, group)), float(global_norm([parameter], math.inf, group))


def test_pipeline_stages_3_and_4_give_5() -> None:
    assert run_ranks(_stages, 2) == [(5.0, 4.0)] * 2


def test_a_norm_below_the_limit_changes_nothing_bitwise() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([0.3, 0.4])
    clip_by_norm([parameter], global_norm([parameter]), 1.0)
    assert torch.equal(parameter.grad, torch.tensor([0.3, 0.4]))


def test_the_norm_of_a_large_gradient_is_exact_however_it_is_cut() -> None:
    """4 M elements, added one after the other in fp32, would be wrong by 1e-4, and by less in two halves."""
    gradient = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 1e-3
    expected = gradient.double().norm().item()
    for pieces in (1, 2):
        parameters = [nn.Parameter(torch.zeros_like(piece)) for piece in gradient.chunk(pieces)]
        for parameter, piece in zip(parameters, gradient.chunk(pieces), strict=True):
            parameter.grad = piece
        assert float(global_norm(parameters)) == pytest.approx(expected, rel=2e-7)
