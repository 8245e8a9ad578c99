"""What cut 1 moves and what it holds in one optimizer step, measured, against closed forms.

u_1 ... u_U are the elements of the units, their sum is P; n ranks share the shards, r replicas; m micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.parity import TINY, Case, micro_batches
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.ledger import CommunicationLedger, Traffic
from titan5d.models.args import count_parameters
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel, before_microbatch
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology
from titan5d.train.loss import normalized
from titan5d.train.step import forward, train_step

CPU = torch.device("cpu")
ARGS = replace(TINY, n_layers=2)
COUNT = count_parameters(ARGS)
UNITS = [COUNT.embedding, *[COUNT.layer] * ARGS.n_layers, COUNT.head]
P = sum(UNITS)


class WeightsAndGradients(CommunicationLedger):
    """Leaves out the few numbers a step sends besides: counts, losses, the norm."""

    def record(self, op: str, payload: list[torch.Tensor], group: Any, staying: int = 0) -> None:
        if sum(tensor.numel() for tensor in payload) > 100:
            super().record(op, payload, group, staying)


@dataclass
class Run:
    """One rank's model and data, ready for a step."""

    case: Case
    meshes: Meshes
    model: Any
    optimizer: torch.optim.Optimizer
    batches: list[Any]

    def step(self) -> None:
        case = self.case
        train_step(self.model, self.optimizer, self.batches, self.meshes, case.stage, 1.0, CPU)

    def ledger(self) -> CommunicationLedger:
        axes = {"replicas": "dp_replicate", "shards": "shard"}
        return WeightsAndGradients(
            {name: self.meshes.parameters.get_group(axis) for name, axis in axes.items()}
        )


def start(case: Case) -> Run:
    meshes = Meshes(case.topology, "cpu")
    plan = DataParallel(case.stage, case.reshard_degree, param_dtype=case.dtype)
    recompute = ActivationCheckpoint(mode=case.recompute)  # type: ignore[arg-type]
    model = build_parallel_model(
        case.args, meshes, plan, recompute, Compile(), torch.float32, seed=5, device=CPU
    )
    optimizer = torch.optim.AdamW(model.parameters())
    return Run(case, meshes, model, optimizer, micro_batches(case, 0, meshes.dp_rank))


Totals = dict[tuple[str, str], Traffic]


def _totals(ledger: CommunicationLedger) -> Totals:
    found: Totals = {}
    for entry in ledger.entries:
        found[entry.axis, entry.op] = found.get((entry.axis, entry.op), Traffic()) + entry.traffic
    return found


def _two_steps(case: Case) -> list[Totals]:
    run, steps = start(case), []
    for _ in range(2):
        with run.ledger() as ledger:
            run.step()
        steps.append(_totals(ledger))
    return steps


def _each_micro_batch(case: Case) -> list[Totals]:
    """Forward and backward of each, and at last what the rest of a step moves."""
    run, found = start(case), []
    for index, batch in enumerate(run.batches):
        with run.ledger() as ledger:
            before_microbatch(run.model, case.stage, last=index == len(run.batches) - 1)
            normalized(forward(run.model, batch, CPU)[0], 100).backward()
        found.append(_totals(ledger))
    with run.ledger() as ledger:
        run.optimizer.step()
    return [*found, _totals(ledger)]


def ring(share: float, calls: int, elements: int, width: int = 4) -> Traffic:
    return Traffic(calls, share * elements * width, elements * width)


def closed_form(case: Case) -> Totals:
    """Everything one rank moves for weights and gradients in one optimizer step."""
    n, r, m = case.topology.dp_shard, case.topology.dp_replicate, case.accumulation
    width = case.dtype.itemsize
    part = (n - 1) / n
    if case.stage == 0:
        return {("shards", "all_reduce"): ring(2 * part, len(UNITS), P)}
    gathers = {
        1: ring(part, len(UNITS), P, width),
        2: ring(part, len(UNITS), P, width),
        # twice a micro-batch, but for the last unit, which backward needs first
        3: ring(part, m * (2 * len(UNITS) - 1), m * (2 * P - UNITS[-1]), width),
    }
    reductions = m if case.stage >= 2 else 1
    form = {
        ("shards", "all_gather"): gathers[case.stage],
        ("shards", "reduce_scatter"): ring(part, reductions * len(UNITS), reductions * P),
    }
    if r > 1:
        form["replicas", "all_reduce"] = ring(2 * (r - 1) / r, len(UNITS), P // n)
    return form


def assert_same(found: Totals, expected: Totals) -> None:
    assert found.keys() == expected.keys()
    for key, traffic in expected.items():
        assert found[key] == replace(traffic, bytes=pytest.approx(traffic.bytes)), key


CASES = {
    **{
        f"stage {stage}, 2 ranks, 4 micro-batches": Case(Topology(dp_shard=2), stage, 4, args=ARGS)
        for stage in range(4)
    },
    **{f"stage {stage}, 4 ranks": Case(Topology(dp_shard=4), stage, args=ARGS) for stage in range(4)},
    **{
        f"stage {stage}, 2 x 2 ranks, 2 micro-batches": Case(
            Topology(dp_replicate=2, dp_shard=2), stage, 2, args=ARGS
        )
        for stage in (1, 2, 3)
    },
    "stage 3, recomputed: no unit is gathered for it": Case(
        Topology(dp_shard=2), 3, recompute="full", args=ARGS
    ),
    "stage 2, bf16": Case(Topology(dp_shard=2), 2, dtype=torch.bfloat16, args=ARGS),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_moves_its_closed_form(name: str) -> None:
    case = CASES[name]
    for steps in run_ranks(_two_steps, case.topology.world_size, case):
        for found in steps:
            assert_same(found, closed_form(case))


def test_stages_against_one_all_reduce() -> None:
    """ZeRO paper, section 7: stages 1 and 2 move what all-reduce moves, stage 3 half as much again."""
    sent = {}
    for stage in range(4):
        totals = run_ranks(_two_steps, 2, Case(Topology(dp_shard=2), stage, args=ARGS))[0][0]
        sent[stage] = sum(traffic.bytes for traffic in totals.values())
    assert sent[0] == sent[1] == sent[2] == 2 * P * 4 / 2
    assert sent[3] / sent[0] == pytest.approx(1.5 - UNITS[-1] / P / 2)  # the last unit is not gathered again


NO_TRAFFIC: Totals = {}


@pytest.mark.parametrize("stage", range(4))
def test_when_a_step_communicates(stage: int) -> None:
    """Four micro-batches: gradients travel after the last one only (stages 0, 1) or after each; weights likewise."""
    once, reduced = ring(0.5, len(UNITS), P), ("shards", "reduce_scatter")
    twice = ring(0.5, 2 * len(UNITS) - 1, 2 * P - UNITS[-1])
    gathered = {("shards", "all_gather"): twice if stage == 3 else once}
    expected: list[Totals] = {
        0: [NO_TRAFFIC] * 3 + [{("shards", "all_reduce"): ring(1.0, len(UNITS), P)}],
        1: [gathered, NO_TRAFFIC, NO_TRAFFIC, {reduced: once}],
        2: [{**gathered, reduced: once}, *[{reduced: once}] * 3],
        3: [{**gathered, reduced: once}] * 4,
    }[stage]
    for found in run_ranks(
        _each_micro_batch, 2, Case(Topology(dp_shard=2), stage, accumulation=4, args=ARGS)
    ):
        for micro_batch, traffic in zip(found, [*expected, NO_TRAFFIC], strict=True):
            assert_same(micro_batch, traffic)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_are_summed_once_a_step(stage: int) -> None:
    case = Case(Topology(dp_replicate=2, dp_shard=2), stage, accumulation=2, args=ARGS)
    for first, last, update in run_ranks(_each_micro_batch, 4, case):
        assert ("replicas", "all_reduce") not in first
        assert last["replicas", "all_reduce"] == ring(1.0, len(UNITS), P // 2)
        assert not update
        assert {op for axis, op in last if axis == "replicas"} == {
            "all_reduce"
        }  # gathers stay in the shard group


def test_regrouped_shards_are_gathered_in_their_group() -> None:
    case = Case(Topology(dp_shard=4), stage=3, accumulation=2, reshard_degree=2, args=ARGS)
    for rank, found in enumerate(run_ranks(_two_steps, 4, case)):
        group = "ranks 0,1" if rank < 2 else "ranks 2,3"
        expected = {
            ("shards", "all_gather"): ring(3 / 4, 2 * len(UNITS), 2 * P),
            (group, "all_gather"): ring(1 / 2, 2 * (len(UNITS) - 1), 2 * (P - UNITS[-1])),
            ("shards", "reduce_scatter"): ring(3 / 4, 2 * len(UNITS), 2 * P),
        }
        assert_same(found[0], expected)
