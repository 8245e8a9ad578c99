"""What a run with experts logs about them: the same on any layout, true to the counts, drawn in TensorBoard."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.test_moe import TINY_M
from tests.parity import Case, build_pipeline, micro_batches, pipeline_plan
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.writers import MetricsLogger, TensorBoardWriter
from titan5d.models.args import Balance
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology
from titan5d.train.routing import Routing
from titan5d.train.step import train_step

BALANCE = Balance(aux_loss_coefficient=0.05, bias_update_rate=0.001, capacity_factor=1.0)
ARGS = replace(TINY_M, n_layers=3, n_dense_layers=1, balance=BALANCE)


def logged(case: Case) -> list[Routing]:
    """Of two steps."""
    meshes, cpu = Meshes(case.topology, "cpu", has_experts=True), torch.device("cpu")
    off = ActivationCheckpoint(), Compile()
    plan = pipeline_plan(case)
    model = build_parallel_model(
        case.args, meshes, DataParallel(case.stage), *off, torch.float32, seed=5, device=cpu, pipeline=plan
    )
    pipeline = build_pipeline(case, meshes, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [
        train_step(
            model,
            optimizer,
            micro_batches(case, step, meshes.dp_rank),
            meshes,
            case.stage,
            0.0,
            cpu,
            pipeline,
        ).routing
        for step in range(2)
    ]


@pytest.mark.parametrize(
    "topology",
    [Topology(dp_shard=2, tp=2, ep=4), Topology(dp_shard=2, pp=2, ep=2), Topology(cp=2, ep=2)],
    ids=str,
)
def test_every_rank_of_every_layout_logs_what_one_process_logs(topology: Topology) -> None:
    (alone,) = run_ranks(logged, 1, Case(stage=0, args=ARGS, seq_len=32))
    for steps in run_ranks(logged, topology.world_size, Case(topology, 2, args=ARGS, seq_len=32)):
        for found, expected in zip(steps, alone, strict=True):
            assert found.load == expected.load
            assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)


def test_the_numbers_mean_what_they_say() -> None:
    (steps,) = run_ranks(logged, 1, Case(stage=0, args=ARGS, seq_len=32))
    assert [step.metrics["moe/layer_1/bias_range"] for step in steps] == [0, pytest.approx(0.002)]
    for step in steps:
        assert len(step.load) == 2 and "moe/layer_0/entropy" not in step.metrics  # the first layer is dense
        for layer, load in zip((1, 2), step.load, strict=True):
            assert sum(load) == pytest.approx(8)
            assert step.metrics[f"moe/layer_{layer}/max_load"] == max(load)
            assert step.metrics[f"moe/layer_{layer}/min_load"] == min(load)
            assert 0 < step.metrics[f"moe/layer_{layer}/entropy"] <= math.log(8)
            over = sum(max(0.0, share - 1) for share in load) * 8 * 32 * 2 / 8  # rows fill up one by one
            assert step.metrics[f"moe/layer_{layer}/dropped"] >= over


def test_the_heat_map_is_a_picture(tmp_path: Path) -> None:
    logger = MetricsLogger([TensorBoardWriter(tmp_path, "SGD")])
    logger.heat_map(3, "moe/load", [[0.0, 1.0, 4.0], [1.0, 1.0, 1.0]])
    logger.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    (picture,) = events.Images("moe/load")
    assert (picture.step, picture.width, picture.height) == (3, 24, 16)
