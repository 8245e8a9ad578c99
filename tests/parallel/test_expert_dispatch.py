"""The exchange of rows by itself: against a lookup in all ranks' rows; in flight beside other work; its bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models.test_moe import TINY_M
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.ledger import CommunicationLedger
from titan5d.models.args import Balance
from titan5d.models.moe import MoE, Rows
from titan5d.parallel import expert_dispatch
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.expert_dispatch import AllToAll, plan_route
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology

LOADS = {
    "uneven": [[3, 0, 2, 1], [0, 4, 1, 2]],
    "one rank gets all": [[2, 3, 0, 0], [1, 5, 0, 0]],
    "one expert gets all": [[0, 0, 0, 6], [0, 0, 0, 4]],
    "one rank sends nothing": [[0, 0, 0, 0], [1, 2, 1, 2]],
    "nobody sends anything": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "one expert a rank": [[3, 2], [0, 5]],
}
N_ROWS, DIM = 9, 5


def rows_of(rank: int) -> Tensor:
    return torch.randn(N_ROWS, DIM, generator=torch.Generator().manual_seed(rank))


def there_and_back(loads: list[list[int]], with_weights: bool, dtype: torch.dtype) -> list[Any]:
    """Sends rows, multiplies those of expert e by e + 1 (and by their weight), and sends them back."""
    rank, experts_here = dist.get_rank(), len(loads[0]) // dist.get_world_size()
    rows = rows_of(rank).to(dtype).requires_grad_()
    weights = torch.arange(1.0, N_ROWS + 1).requires_grad_() if with_weights else None
    ends = torch.tensor(loads[rank]).cumsum(0).int()
    exchange = AllToAll(dist.group.WORLD)
    trips = exchange.send(Rows(rows, ends, True, weights))
    here = exchange.arrive(trips)
    counts = torch.diff(here.ends, prepend=torch.zeros(1, dtype=torch.int32))
    factor = (torch.arange(experts_here) + rank * experts_here + 1).repeat_interleave(counts)[:, None]
    out = here.rows * factor
    if here.weights is not None:
        out = out * here.weights[:, None]
    back = exchange.give_back(out, trips)
    (back * (rank + 1)).sum().backward()
    assert rows.grad is not None
    weight_grad = None if weights is None else weights.grad
    return [here.rows.detach(), here.ends, here.has_tail, back.detach(), rows.grad, weight_grad]


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("name", LOADS)
def test_rows_reach_their_experts_and_come_back(name: str, with_weights: bool) -> None:
    loads = LOADS[name]
    experts_here = len(loads[0]) // 2
    starts = [[sum(load[:e]) for e in range(len(load))] for load in loads]
    for rank, (here, ends, has_tail, back, grad, grad_weights) in enumerate(
        run_ranks(there_and_back, 2, loads, with_weights, torch.float32)
    ):
        expected = [
            rows_of(source)[starts[source][e] : starts[source][e] + loads[source][e]]
            for e in range(rank * experts_here, (rank + 1) * experts_here)
            for source in range(2)
        ]
        assert torch.equal(here, torch.cat(expected)) and not has_tail
        totals = torch.tensor(loads).sum(0)[rank * experts_here : (rank + 1) * experts_here]
        assert torch.equal(ends, totals.cumsum(0).int())

        sent = sum(loads[rank])
        factor = torch.zeros(N_ROWS)
        factor[:sent] = torch.arange(1.0, len(loads[0]) + 1).repeat_interleave(torch.tensor(loads[rank]))
        weights = torch.arange(1.0, N_ROWS + 1) if with_weights else torch.ones(N_ROWS)
        torch.testing.assert_close(back, rows_of(rank) * (factor * weights)[:, None])
        upstream = (rank + 1) * factor[:, None]
        torch.testing.assert_close(grad, (upstream * weights[:, None]).expand(N_ROWS, DIM))
        if with_weights:
            torch.testing.assert_close(grad_weights, (upstream * rows_of(rank)).sum(1))


def test_bf16_rows_travel_as_they_are() -> None:
    for rank, (_, _, _, back, grad, _) in enumerate(
        run_ranks(there_and_back, 2, LOADS["one rank gets all"], False, torch.bfloat16)
    ):
        assert back.dtype == grad.dtype == torch.bfloat16
        sent = sum(LOADS["one rank gets all"][rank])
        factor = torch.tensor([1.0, 2.0]).repeat_interleave(
            torch.tensor(LOADS["one rank gets all"][rank][:2])
        )
        assert torch.equal(back[:sent], rows_of(rank).bfloat16()[:sent] * factor[:, None].bfloat16())


def flights(recompute: str) -> list[list[str]]:
    """What happens in one layer, forward and backward, in order."""
    events: list[str] = []
    args = replace(TINY_M, n_layers=1)
    meshes = Meshes(Topology(dp_shard=2, ep=2), "cpu", has_experts=True)
    off = ActivationCheckpoint(mode=recompute), Compile()  # type: ignore[arg-type]
    model = build_parallel_model(args, meshes, DataParallel(), *off, torch.float32, 0, torch.device("cpu"))
    model.eval()  # balance is not at issue, and needs to know the step
    moe = model.layers["0"].feed_forward
    assert isinstance(moe, MoE) and isinstance(moe.shared_experts, nn.Module)
    start, land = expert_dispatch.Route.start, expert_dispatch.Flight.land

    def noted_start(self: Any, rows: Tensor, there: bool) -> Any:
        events.append("start there" if there else "start back")
        return start(self, rows, there)

    def noted_land(self: Any) -> Tensor:
        events.append("land")
        return land(self)

    expert_dispatch.Route.start, expert_dispatch.Flight.land = noted_start, noted_land  # type: ignore[method-assign]
    moe.shared_experts.register_forward_hook(lambda *_: events.append("shared"))
    moe.experts.register_forward_hook(lambda *_: events.append("experts"))
    moe.shared_experts.register_full_backward_hook(lambda *_: events.append("shared"))
    tokens = torch.arange(32).view(2, 16)
    loss, _ = model(tokens, labels=tokens)
    forward = list(events)
    events.clear()
    loss.backward()
    return [forward, events]


FORWARD = ["start there", "shared", "land", "experts", "start back", "land"]
BACKWARD = ["start there", "land", "start back", "shared", "land"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_shared_experts_are_computed_while_rows_are_under_way(recompute: str) -> None:
    for forward, backward in run_ranks(flights, 2, recompute):
        assert forward == FORWARD
        assert backward == (BACKWARD if recompute == "none" else FORWARD + BACKWARD)


def bytes_of_a_step(topology: Topology, dtype: torch.dtype, axis: str) -> list[tuple[str, int, float]]:
    """(type, calls, bytes sent) of the all-to-alls of one forward and backward with an even load."""
    args = replace(TINY_M, n_layers=3, n_dense_layers=1, balance=Balance(force_load_balance=True))
    meshes = Meshes(topology, "cpu", has_experts=True)
    data = DataParallel(param_dtype=dtype)
    off = ActivationCheckpoint(), Compile()
    model = build_parallel_model(args, meshes, data, *off, torch.float32, 0, torch.device("cpu")).eval()
    tokens = torch.arange(64).view(2, 32)
    with CommunicationLedger({axis: meshes.group(axis)}) as ledger:
        model(tokens, labels=tokens)[0].backward()
    return [
        (entry.dtype, entry.traffic.count, entry.traffic.bytes)
        for entry in ledger.entries
        if (entry.axis, entry.op) == (axis, "all_to_all")
    ]


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (4, torch.float32), (2, torch.bfloat16)])
def test_bytes_are_the_closed_form(ranks: int, dtype: torch.dtype) -> None:
    """k T h q (1 - 1/e) each way, forward and backward, and E whole numbers (8 bytes) forward."""
    layers, each_way = 2, TINY_M.top_k * 64 * TINY_M.dim * dtype.itemsize * (1 - 1 / ranks)
    counts = TINY_M.n_experts * 8 * (1 - 1 / ranks)
    name = str(dtype).removeprefix("torch.")
    expected = sorted([(name, 4 * layers, 4 * layers * each_way), ("int64", layers, layers * counts)])
    for found in run_ranks(bytes_of_a_step, ranks, Topology(dp_shard=ranks, ep=ranks), dtype, "ep"):
        assert sorted(found) == expected


def most_rows(factor: float) -> int:
    """Rows that arrive at one rank when every token asks for expert 0, with a capacity in force."""
    args = replace(TINY_M, balance=Balance(capacity_factor=factor))
    torch.manual_seed(0)
    router = MoE(args).router.eval()
    router.bias[0] = 1e4
    experts, _ = router(torch.randn(4, 32, args.dim), None)
    counts = torch.bincount(experts.flatten(), minlength=9)[:8]
    route = plan_route(counts.cumsum(0).int(), experts.numel(), dist.group.WORLD)
    return sum(route.arriving)


def test_capacity_bounds_what_a_rank_has_to_hold() -> None:
    """4 rows of 32 tokens and 2 choices on each of 2 ranks: an expert takes factor x 8 of a row, 4 experts are here."""
    free, bounded = run_ranks(most_rows, 2, 0.0), run_ranks(most_rows, 2, 1.0)
    assert free[0] > 2 * 4 * 32  # all first choices of both ranks, and some second ones
    assert bounded[0] <= 2 * 4 * 4 * 8
