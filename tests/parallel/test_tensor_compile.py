"""Tensor parallelism in compiled blocks: the same gradients, one graph for all layers, also without gradients."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch._dynamo  # the first custom operator imports it: once here instead of on each forked rank

from tests.parity import TINY, TINY_TIED, Case, assert_parity, micro_batches
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.tensor import TensorParallel
from titan5d.topology import Topology

ONE_LAYER = replace(TINY, n_layers=1)
FEW_HEADS = replace(TINY, n_layers=1, n_kv_heads=2, qk_norm=True, attention_bias=True, vocab_size=250)
SP, NO_SP = TensorParallel(), TensorParallel(sequence_parallel=False)


@pytest.mark.parametrize(
    "case",
    [
        # Data parallelism beside it can turn the embedding's gradient into zeros without a word
        Case(Topology(dp_shard=2, tp=2), args=replace(TINY_TIED, n_layers=1), accumulation=2, documents=True),
        Case(Topology(tp=2), args=ONE_LAYER, tensor=NO_SP),
        Case(Topology(tp=2), args=ONE_LAYER, recompute="full", tensor=TensorParallel(regather_input=False)),
    ],
    ids=["fsdp_tied", "no_sp", "full"],
)
def test_gradients(case: Case) -> None:
    assert_parity(replace(case, compile=True), timeout=110)


@pytest.mark.slow
def test_gradients_by_inductor() -> None:
    case = Case(Topology(dp_shard=2, tp=2), args=ONE_LAYER, accumulation=2, compile=True, backend="inductor")
    assert_parity(case, timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_gradients_with_more_ranks_than_kv_heads(recompute: str) -> None:
    assert_parity(Case(Topology(tp=4), args=FEW_HEADS, recompute=recompute, compile=True), timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [SP, NO_SP], ids=["sp", "no_sp"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_by_stage_and_recompute(stage: int, recompute: str, tensor: TensorParallel) -> None:
    args = replace(FEW_HEADS, n_layers=2)
    case = Case(
        Topology(dp_shard=2, tp=2), stage, 2, args=args, recompute=recompute, tensor=tensor, compile=True
    )
    assert_parity(case, timeout=110)


def graphs_and_losses(layers: int) -> tuple[int, float, float]:
    """(graphs compiled for training and evaluation, loss with gradients, loss without)."""
    case = Case(Topology(tp=2), args=replace(TINY, n_layers=layers))
    compiled: Counter[str] = Counter()

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled["graphs"] += 1
        return graph

    model = build_parallel_model(
        case.args,
        Meshes(case.topology, "cpu"),
        DataParallel(0),
        ActivationCheckpoint(),
        Compile(enable=True, backend=count),  # type: ignore[arg-type]
        torch.float32,
        seed=5,
        device=torch.device("cpu"),
    )
    batch = micro_batches(case, 0, 0)[0]
    for _ in range(2):
        loss, _ = model(batch.tokens, batch.positions, None, batch.labels)
        loss.backward()
    with torch.no_grad():
        evaluated, _ = model(batch.tokens, batch.positions, None, batch.labels)
    return compiled["graphs"], float(loss.detach()), float(evaluated)


def test_graphs_do_not_grow_with_depth_and_evaluation_compiles() -> None:
    shallow, deep = (run_ranks(graphs_and_losses, 2, layers, timeout=110)[0] for layers in (1, 2))
    assert shallow[0] == deep[0] == 4  # of blocks and of the loss, for training and for evaluation
    assert deep[1] == pytest.approx(deep[2], rel=1e-6)
