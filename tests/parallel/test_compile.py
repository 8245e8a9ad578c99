"""How often a model is compiled: as often for many layers as for few, and never again after the second step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from tests.models.test_moe import TINY_M
from tests.parity import TINY, Case, micro_batches
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.models.args import ModelArgs
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology
from titan5d.train.step import forward, train_step

CPU = torch.device("cpu")
VALIDATED = 3
"""The step after which there is a round of validation."""


def six_steps(args: ModelArgs, enable: bool) -> tuple[list[int], list[float]]:
    """(graphs compiled so far, loss) after each step. Other tokens in each, so other loads of the experts."""
    case, meshes = Case(args=args, lr=0.1, valid=(3, 61)), Meshes(Topology(), "cpu")
    compile = Compile(enable=enable, components=["model", "loss"], backend="aot_eager")
    off, data = ActivationCheckpoint(), DataParallel(0)
    model = build_parallel_model(args, meshes, data, off, compile, torch.float32, seed=5, device=CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    graphs, losses = [], []
    for step in range(6):
        losses.append(train_step(model, optimizer, micro_batches(case, step, 0), meshes, 0, 1.0, CPU).loss)
        if step == VALIDATED:
            model.eval()
            with torch.no_grad():
                forward(model, micro_batches(case, 100, 0)[0], CPU)
            model.train()
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs, losses


@pytest.mark.parametrize(
    ("args", "depths"),
    [
        pytest.param(TINY, (4, 12), id="dense"),
        pytest.param(TINY_M, (2, 4), id="experts", marks=pytest.mark.slow),
    ],
)
def test_depth_and_steps_cost_no_compilation(args: ModelArgs, depths: tuple[int, int]) -> None:
    """Case 075: few layers against many; validation may add a graph or two, once."""
    shallow, deep = (replace(args, n_layers=n_layers) for n_layers in depths)
    ((few, losses),) = run_ranks(six_steps, 1, shallow, True, timeout=100)
    ((many, _),) = run_ranks(six_steps, 1, deep, True, timeout=100)
    assert few == many and few[0] > 0
    assert few[1] == few[VALIDATED - 1] and few[VALIDATED] == few[-1] <= few[1] + 2
    ((_, eager),) = run_ranks(six_steps, 1, shallow, False, timeout=100)
    assert losses == pytest.approx(eager, rel=1e-5)
