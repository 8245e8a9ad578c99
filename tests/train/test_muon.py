"""Sharded parameters: updates equal those of one device, Muon's bitwise, and cost what its text says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.test_optimizer import HIDDEN, SHAPES, Section, parameters, set_gradients, train
from titan5d.launch.local_ranks import run_ranks
from titan5d.train.muon import Muon
from titan5d.train.optimizer import build_optimizer

REPLICATE = Replicate()
LAYOUTS: dict[str, tuple[Placement, Placement]] = {
    "FSDP over tensor rows": (_StridedShard(0, split_factor=2), Shard(0)),
    "FSDP over tensor columns": (Shard(0), Shard(1)),
    "tensor inside data": (Shard(1), Shard(0)),
    "HSDP": (REPLICATE, Shard(0)),
    "replicas": (REPLICATE, REPLICATE),
    "four shards of rows, most of them uneven": (Shard(0), Shard(0)),
}


def cut(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    copies = DTensor.from_local(whole, mesh, [REPLICATE] * mesh.ndim, run_check=False)
    return copies.redistribute(placements=placements)


def suitable(placements: tuple[Placement, ...], shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """Vectors have no dimension 1 to cut."""
    return placements if len(shape) > 1 else tuple(Shard(0) if p == Shard(1) else p for p in placements)


def train_cut(config: Section, layout: str, dtype: torch.dtype) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = parameters()
    params: dict[str, Tensor] = {
        name: torch.nn.Parameter(cut(param.detach(), mesh, suitable(LAYOUTS[layout], SHAPES[name])))
        for name, param in whole.items()
    }
    optimizer = build_optimizer(params.items(), config, dtype)
    for step in range(3):
        set_gradients(whole, seed=1 + step)
        for name, param in params.items():
            gradient = whole[name].grad
            assert gradient is not None and isinstance(param, DTensor)
            param.grad = cut(gradient, mesh, param.placements)
        optimizer.step()
    return {
        name: param.full_tensor().detach() for name, param in params.items() if isinstance(param, DTensor)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_on_any_cut_is_bitwise_muon_on_one_device(layout: str, dtype: torch.dtype):
    config = Section(name="Muon")
    expected = train(config, orthogonalize_dtype=dtype)
    for result in run_ranks(train_cut, 4, config, layout, dtype):
        assert [name for name in HIDDEN if not torch.equal(result[name], expected[name])] == []
        for name in SHAPES.keys() - HIDDEN:  # AdamW's: its vector and tail loops round differently
            torch.testing.assert_close(result[name], expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_elementwise_optimizers_on_a_cut(name: str, implementation: str):
    config = Section(name=name, implementation=implementation, momentum=0.9)  # type: ignore[arg-type]
    expected = train(config)
    result = run_ranks(train_cut, 4, config, "FSDP over tensor rows", torch.float32)[3]
    for key in SHAPES:
        torch.testing.assert_close(result[key], expected[key], rtol=1e-6, atol=1e-7)


class Cuts(TorchDispatchMode):
    """Notes the operators that were given DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            self.names.add(str(func))
            return NotImplemented
        return func(*args, **(kwargs or {}))


def operators_on_cuts(config: Section) -> set[str]:
    """In the second step, which makes no state any more."""
    mesh = init_device_mesh("cpu", (2,))
    kept = {name: param for name, param in parameters().items() if name not in HIDDEN}
    params = {name: torch.nn.Parameter(cut(param.detach(), mesh, (Shard(0),))) for name, param in kept.items()}
    optimizer = build_optimizer(params.items(), config)
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with Cuts() as cuts:
        optimizer.step()
    return cuts.names


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Muon"])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_adam_steps_the_shards_themselves(name: str, implementation: str):
    """torch takes seconds to decide how hundreds of parameters are cut."""
    config = Section(name=name, implementation=implementation)  # type: ignore[arg-type]
    assert run_ranks(operators_on_cuts, 2, config) == [set(), set()]


def unreduced_gradient(shape: tuple[int, ...], placement: Placement) -> tuple[Tensor, Tensor, int]:
    """Weights after a gradient that is still a sum over ranks, after the summed one, and reductions of the first."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    weight, parts = torch.randn(shape), torch.randn(2, *shape)
    partial = DTensor.from_local(parts[mesh.get_local_rank()], mesh, [Partial()], run_check=False)
    results, reductions = [], []
    for gradient in (partial, cut(parts.sum(0), mesh, (placement,))):
        param = torch.nn.Parameter(cut(weight, mesh, (placement,)))
        param.grad = gradient
        optimizer = build_optimizer([("layers.0.weight", param)], Section(name="Muon"))
        with CommDebugMode() as counted:
            optimizer.step()
        reductions.append(sum(count for kind, count in counted.get_comm_counts().items() if "reduce" in str(kind)))
        results.append(param.full_tensor().detach())
    return results[0], results[1], reductions[0]


@pytest.mark.parametrize(("shape", "placement"), [((6, 4), REPLICATE), ((6, 4), Shard(0)), ((4, 6, 4), Shard(0))])
def test_gradients_that_are_partial_sums_are_summed_once(shape: tuple[int, ...], placement: Placement):
    for partial, summed, reductions in run_ranks(unreduced_gradient, 2, shape, placement):
        assert torch.equal(partial, summed)
        assert reductions == 1


def experts_stay() -> tuple[Any, bool]:
    """Experts spread over ranks are whole on their rank: nothing is gathered; 3 of them over 2 ranks are uneven."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    stack, gradient = torch.randn(3, 6, 4), torch.randn(3, 6, 4)
    alone, spread = torch.nn.Parameter(stack.clone()), torch.nn.Parameter(cut(stack, mesh, (Shard(0),)))
    alone.grad, spread.grad = gradient, cut(gradient, mesh, (Shard(0),))
    for param in (alone, spread):
        optimizer = build_optimizer([("layers.0.moe.experts.w1", param)], Section(name="Muon"))
        with CommDebugMode() as counted:
            optimizer.step()
    return dict(counted.get_comm_counts()), torch.equal(spread.full_tensor(), alone)


def test_spread_experts_cost_no_communication():
    for counts, equal in run_ranks(experts_stay, 2):
        assert equal
        assert counts == {}


def count_work() -> tuple[dict[str, int], list[int]]:
    """Collectives of one step over six 8 x 8 matrices on four ranks, and how many this rank made orthogonal."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    params = [torch.nn.Parameter(cut(torch.randn(8, 8), mesh, (Shard(0),))) for _ in range(6)]
    for param in params:
        param.grad = param.detach().clone()
    optimizer = build_optimizer(
        [(f"layers.{i}.wq.weight", param) for i, param in enumerate(params)], Section(name="Muon")
    )
    with CommDebugMode() as counted, torch.utils.flop_counter.FlopCounterMode(display=False) as flops:
        optimizer.step()
    counts = {str(kind).rpartition(".")[2]: count for kind, count in counted.get_comm_counts().items()}
    one = 5 * 3 * 2 * 8**3  # five rounds of three products
    return counts, [flops.get_total_flops() // one]


def test_one_gather_and_one_broadcast_a_matrix_and_the_products_shared_out():
    results = run_ranks(count_work, 4)
    for counts, _ in results:
        assert counts == {"all_gather_into_tensor": 6, "broadcast_": 6}
    assert [made for _, (made,) in results] == [2, 2, 1, 1]


def named_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state under the names that the groups carry, as a checkpoint holds it."""
    return {
        f"{name}.{key}": value
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
        for key, value in optimizer.state[param].items()
    }


def save_and_continue(name: str, folder: str) -> tuple[bool, set[str]]:
    """State saved by name under one cut and loaded by name into a run under another cut continues the same run."""

    def build(
        mesh: DeviceMesh, placements: tuple[Placement, ...]
    ) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
        params: dict[str, Tensor] = {
            key: torch.nn.Parameter(cut(param.detach(), mesh, suitable(placements, SHAPES[key])))
            for key, param in parameters().items()
        }
        config = Section(name=name, momentum=0.9)  # type: ignore[arg-type]
        return params, build_optimizer(params.items(), config)

    def step(params: dict[str, Tensor], optimizer: torch.optim.Optimizer, seed: int) -> None:
        whole = parameters()
        set_gradients(whole, seed)
        for key, param in params.items():
            gradient = whole[key].grad
            assert gradient is not None and isinstance(param, DTensor)
            param.grad = cut(gradient, param.device_mesh, param.placements)
        optimizer.step()

    params, optimizer = build(init_device_mesh("cpu", (2, 2)), (Shard(0), Shard(1)))
    for seed in (1, 2):
        step(params, optimizer, seed)
    checkpoint.save({**params, **named_state(optimizer)}, checkpoint_id=folder)

    others, resumed = build(init_device_mesh("cpu", (4,)), (Shard(0),))
    step(others, resumed, 9)  # makes the state that is loaded into; every number of it is replaced
    checkpoint.load({**others, **named_state(resumed)}, checkpoint_id=folder)
    step(params, optimizer, 3)
    step(others, resumed, 3)
    equal = [
        torch.equal(one.full_tensor(), other.full_tensor())
        for one, other in zip(params.values(), others.values(), strict=True)
        if isinstance(one, DTensor) and isinstance(other, DTensor)
    ]
    return all(equal) and len(equal) == len(SHAPES), set(named_state(optimizer))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_state_is_saved_by_name_and_moves_to_another_cut(name: str, tmp_path: Path):
    moment = {"AdamW": "exp_avg", "SGD": "momentum_buffer", "Muon": "momentum_buffer"}[name]
    for equal, keys in run_ranks(save_and_continue, 4, name, str(tmp_path)):
        assert equal
        assert f"layers.0.attention.wq.weight.{moment}" in keys
        assert len(keys) >= len(SHAPES)


def test_muon_refuses_a_closure():
    optimizer = build_optimizer(parameters().items(), Section(name="Muon"))
    assert isinstance(optimizer, Muon)
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)
