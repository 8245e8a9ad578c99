"""Experts cut along their hidden width: whole steps against one process, the exchange against a lookup, its bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tests.models.test_moe import TINY_M
from tests.parallel.test_audit import audited
from tests.parallel.test_expert import (
    ARGS,
    BALANCED,
    BEFORE_W2,
    CAPACITY,
    FORCED,
    SIGMOID,
    case,
    first_half,
    named,
    one_hot_expert,
    poisoned,
    with_experts,
)
from tests.parallel.test_expert_dispatch import bytes_of_a_step
from tests.parity import TINY_LATENT, UNEQUAL, Case, assert_parity, layout, reference
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.models.moe import Rows
from titan5d.parallel import expert_dispatch
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.expert_dispatch import AllToAll, Flight
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology

TIMEOUT = 120.0
CASES = {
    "slices alone": case(dp_shard=2, etp=2),
    "beside shares, accumulation": case(stage=1, dp_shard=4, ep=2, etp=2, accumulation=2),
    "over tensor ranks, score before w2": case(
        replace(ARGS, balance=BEFORE_W2), stage=0, tp=2, etp=2, recompute="selective"
    ),
    "over context ranks, capacity, documents, padding": case(
        replace(ARGS, balance=CAPACITY), cp=2, etp=2, documents=True, padding=5, recompute="full"
    ),
    "experts that do not divide over shards": case(with_experts(3), dp_shard=4, etp=2),
    "compiled": case(with_experts(4, 1, router_normalize=False), stage=2, dp_shard=2, etp=2, compile=True),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    assert_parity(CASES[name], timeout=TIMEOUT)


SLOW = {
    "replicas": case(stage=0, dp_shard=4, ep=2, etp=2),
    "HSDP": case(dp_replicate=2, dp_shard=4, etp=2, accumulation=2),
    "shares, slices and shards": case(stage=2, dp_shard=8, ep=2, etp=2),
    "slices beside regrouped shards": case(dp_shard=8, etp=2, reshard_degree=2),
    "four slices": case(dp_shard=4, etp=4),
    "fewer experts than ranks": case(with_experts(2), dp_shard=8, etp=2, accumulation=2),
    # 7 experts on 3 shards: of w1 (7, 24 / 2, 64) only the dimension that is cut already divides, a strided shard
    "nothing divides but a slice": case(with_experts(7, moe_ffn_dim=24), dp_shard=6, etp=2, valid=(9,) * 12),
    "16 experts, top 6": case(
        with_experts(16, 6, balance=CAPACITY), stage=1, dp_shard=4, ep=2, etp=2, recompute="full"
    ),
    "data and tensor ranks": case(dp_shard=2, tp=2, ep=2, etp=2, recompute="selective", accumulation=2),
    "beside tensor ranks": case(dp_shard=2, tp=2, etp=2),
    "data and context ranks, score before w2": case(replace(ARGS, balance=BEFORE_W2), cp=2, dp_shard=2, etp=2),
    "context x tensor, forced balance": case(FORCED, cp=2, tp=2, etp=2, accumulation=2, documents=True, padding=5),
    "all cuts": case(
        replace(ARGS, n_layers=4), stage=2, pp=2, cp=2, tp=2, ep=2, etp=2, recompute="full", microbatch_size=2
    ),
    "pipeline, first rank without experts": case(
        replace(ARGS, n_layers=4, n_dense_layers=3), stage=2, pp=2, dp_shard=2, etp=2
    ),
    "pipeline that splits backward": case(
        replace(ARGS, n_layers=4), stage=2, pp=2, dp_shard=4, ep=2, etp=2, schedule="ZBVZeroBubble"
    ),
    "pipeline, two micro-batches at once": case(
        replace(ARGS, n_layers=4),
        stage=2,
        pp=2,
        dp_shard=4,
        ep=2,
        etp=2,
        schedule="DualPipeV",
        overlap=True,
        valid=(9,) * 16,
        recompute="full",
    ),
    "latent attention, groups, a dense layer": case(
        replace(TINY_LATENT, balance=BALANCED), dp_shard=2, tp=2, ep=2, etp=2
    ),
    "sigmoid scores, groups of experts": case(with_experts(16, 4, **SIGMOID), dp_shard=4, ep=2, etp=2),
    "compiled beside tensor ranks": case(dp_shard=2, tp=2, ep=2, etp=2, compile=True, recompute="full"),
    "state in the host's memory": case(dp_shard=2, etp=2, cpu_offload=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_equals_one_process_everywhere(name: str) -> None:
    assert_parity(SLOW[name], timeout=240)


MATRIX = [
    case(with_experts(4, 2, balance=balance), stage, ep=ep, etp=etp, accumulation=acc, recompute=ac, **degrees)
    for index, degrees in enumerate(
        (
            {"dp_shard": 4},
            {"dp_replicate": 2, "dp_shard": 2},
            {"dp_shard": 2, "tp": 2},
            {"dp_shard": 2, "cp": 2},
            {"dp_shard": 2, "pp": 2},
            {"cp": 2, "tp": 2},
        )
    )
    for ep, etp in ((1, 2), (1, 4), (2, 2))
    if (degrees.get("dp_shard", 1) * degrees.get("cp", 1) * degrees.get("tp", 1)) % (ep * etp) == 0
    for stage, acc, ac, balance in [
        ((1, 2, "none", BALANCED), (2, 1, "full", CAPACITY), (3, 2, "selective", BEFORE_W2))[(index + ep) % 3]
    ]
]


@pytest.mark.slow
@pytest.mark.parametrize("one", MATRIX, ids=named)
def test_matrix(one: Case) -> None:
    assert_parity(one, timeout=TIMEOUT)


# Weights


def held(args: Any, topology: Topology) -> dict[str, tuple[Any, ...]]:
    meshes = Meshes(topology, "cpu", has_experts=True)
    off = ActivationCheckpoint(), Compile()
    model = build_parallel_model(args, meshes, DataParallel(), *off, torch.float32, 0, torch.device("cpu"))
    experts = model.layers["0"].feed_forward.experts  # type: ignore[union-attr]
    found = {}
    for name, weight in experts.named_parameters():
        assert isinstance(weight, DTensor)
        found[name] = (weight.device_mesh.mesh_dim_names, weight.placements, tuple(weight.to_local().shape))
    return found


def test_placements_tell_who_holds_what() -> None:
    """3 experts on 2 shards: FSDP2 slices a dimension that the hidden width is not."""
    for found in run_ranks(held, 4, with_experts(3), Topology(dp_shard=4, etp=2)):
        axes = ("efsdp", "etp", "ep")
        assert found["w1"] == found["w3"] == (axes, (Shard(2), Shard(1), Shard(0)), (3, 32, 32))
        assert found["w2"] == (axes, (Shard(1), Shard(2), Shard(0)), (3, 32, 32))


@pytest.mark.parametrize(
    ("args", "degrees"),
    [
        (with_experts(3), {"dp_shard": 4, "etp": 2}),
        (ARGS, {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}),
        pytest.param(ARGS, {"dp_shard": 8, "ep": 2, "etp": 2}, marks=pytest.mark.slow),
        pytest.param(with_experts(7, moe_ffn_dim=24), {"dp_shard": 6, "etp": 2}, marks=pytest.mark.slow),
    ],
    ids=["3 experts", "beside tensor ranks", "8 ranks", "6 ranks"],
)
def test_ranks_start_equal(args: Any, degrees: dict[str, int]) -> None:
    still = replace(case(args, **degrees), steps=1, lr=0.0, valid=(9,) * 12 if degrees["dp_shard"] == 6 else UNEQUAL)
    expected = reference(still).weights
    for outcome in layout(still, TIMEOUT):
        for name, weight in expected.items():
            assert torch.equal(outcome.weights[name], weight), name


def test_gradients_are_what_their_placements_say() -> None:
    assert run_ranks(audited, 4, case(dp_shard=2, tp=2, etp=2, accumulation=2), timeout=TIMEOUT) == [""] * 4


# Loads


@pytest.mark.parametrize(("prepare", "top_k"), [(first_half, 2), (one_hot_expert, 1)])
def test_ranks_without_tokens_and_a_hot_expert(prepare: Any, top_k: int) -> None:
    """No hang, no missing gradient, and both slices of experts without tokens stay as they are."""
    args = with_experts(8, top_k, balance=replace(BALANCED, bias_update_rate=0.0))
    one = case(args, dp_shard=4, ep=2, etp=2, prepare=prepare)
    assert_parity(one, timeout=TIMEOUT)
    idle = [4, 5, 6, 7] if prepare is first_half else [0, 1, 2, 3, 4, 6, 7]
    before = reference(replace(one, lr=0.0)).weights
    for outcome in layout(one, TIMEOUT):
        for name in (name for name in before if ".experts.w" in name and "shared" not in name):
            assert torch.equal(outcome.weights[name][idle], before[name][idle]), name
            assert (outcome.gradients[name][idle] == 0).all()


def test_nothing_unwritten_is_read() -> None:
    args = replace(ARGS, balance=CAPACITY)
    assert_parity(case(args, dp_shard=2, etp=2, prepare=poisoned), timeout=TIMEOUT)


# The exchange

LOADS = {
    "uneven": [[3, 1], [0, 4], [2, 2], [5, 0]],
    "one share gets all": [[3, 0], [4, 0], [1, 0], [2, 0]],
    "nobody sends anything": [[0, 0]] * 4,
}
N_ROWS, DIM = 6, 5


def rows_of(rank: int) -> Tensor:
    return torch.randn(N_ROWS, DIM, generator=torch.Generator().manual_seed(rank))


def there_and_back(loads: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """Two experts on 2 x 2 ranks; slice s of expert e multiplies a row by (e + 1) 10^s and by its weight."""
    rank, share = dist.get_rank(), dist.get_rank() % 2
    rows = rows_of(rank).to(dtype).requires_grad_()
    weights = torch.arange(1.0, N_ROWS + 1).requires_grad_()
    exchange = AllToAll(dist.group.WORLD, slices=2)
    trips = exchange.send(Rows(rows, torch.tensor(loads[rank]).cumsum(0).int(), True, weights))
    here = exchange.arrive(trips)
    assert here.weights is not None and here.rows.shape[0] == sum(load[share] for load in loads)
    out = here.rows * ((share + 1) * 10 ** (rank // 2)) * here.weights[:, None].to(dtype)
    back = exchange.give_back(out, trips)
    (back * (rank + 1)).sum().backward()
    assert rows.grad is not None and weights.grad is not None
    return [back.detach(), rows.grad, weights.grad]


@pytest.mark.parametrize("name", LOADS)
def test_rows_reach_all_slices_and_the_sums_come_back(name: str) -> None:
    loads = LOADS[name]
    for rank, (back, grad, grad_weights) in enumerate(run_ranks(there_and_back, 4, loads, torch.float32)):
        sent = sum(loads[rank])
        factor = torch.zeros(N_ROWS)
        factor[:sent] = 11 * torch.arange(1.0, 3.0).repeat_interleave(torch.tensor(loads[rank]))
        weights = torch.arange(1.0, N_ROWS + 1)
        torch.testing.assert_close(back, rows_of(rank) * (factor * weights)[:, None])
        upstream = (rank + 1) * factor
        torch.testing.assert_close(grad, (upstream * weights)[:, None].expand(N_ROWS, DIM))
        torch.testing.assert_close(grad_weights, upstream * rows_of(rank).sum(1))


class _Landed:
    def wait(self) -> None:
        return None


def test_summands_are_added_in_fp32_and_rounded_once() -> None:
    summands = torch.randn(4, 300, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    flight = Flight(torch.zeros(310, 7, dtype=torch.bfloat16), None, _Landed(), summands)
    found = flight.land()
    assert torch.equal(found[:300], summands.float().sum(0).bfloat16())
    one_by_one = summands[0] + summands[1] + summands[2] + summands[3]
    assert not torch.equal(found[:300], one_by_one)  # the test can tell
    assert (found[300:] == 0).all()


@pytest.mark.parametrize(
    ("topology", "dtype"),
    [(Topology(dp_shard=2, etp=2), torch.bfloat16), (Topology(dp_shard=4, ep=2, etp=2), torch.float32)],
    ids=str,
)
def test_bytes_are_the_closed_form(topology: Topology, dtype: torch.dtype) -> None:
    """etp k T h q (1 - 1/(ep etp)) each way, forward and backward, and etp E whole numbers (8 bytes) forward."""
    ranks, slices = topology.expert_ranks, topology.etp
    layers, each_way = 2, slices * TINY_M.top_k * 64 * TINY_M.dim * dtype.itemsize * (1 - 1 / ranks)
    counts = slices * TINY_M.n_experts * 8 * (1 - 1 / ranks)
    name = str(dtype).removeprefix("torch.")
    expected = [(name, 4 * layers, 4 * layers * each_way), ("int64", layers, layers * counts)]
    for found in run_ranks(bytes_of_a_step, topology.world_size, topology, dtype, "ep_etp"):
        assert sorted(found) == sorted(expected)


# The tests themselves can fail


def one_slice(self: Flight) -> Tensor:
    self.work.wait()
    if self.summands is not None:
        self.result[: self.summands.shape[1]] = self.summands[0]
    return self.result


def summed_twice(self: Flight) -> Tensor:
    self.work.wait()
    if self.summands is not None:
        self.result[: self.summands.shape[1]] = 2 * self.summands.sum(0)
    return self.result


@pytest.mark.parametrize("land", [one_slice, summed_twice])
def test_a_wrong_sum_of_slices_is_noticed(land: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_dispatch.Flight, "land", land)
    with pytest.raises(AssertionError, match="rank 0 loss"):
        assert_parity(CASES["slices alone"], timeout=TIMEOUT)
