"""The compiled loss: the same numbers, one graph for all chunks, with and without a cut vocabulary."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch._dynamo

from tests.parity import TINY, Case, assert_parity, micro_batches
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.models.cross_entropy import ChunkedCrossEntropy
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.tensor import TensorParallel
from titan5d.topology import Topology

ARGS = replace(TINY, n_layers=1, vocab_size=250)


@pytest.mark.parametrize(
    "case",
    [
        Case(args=ARGS, accumulation=2),
        Case(Topology(tp=2), args=ARGS),
        Case(Topology(tp=2), args=ARGS, tensor=TensorParallel(loss_parallel=False)),
    ],
    ids=["one", "cut vocabulary", "gathered logits"],
)
def test_a_compiled_loss_is_the_same(case: Case) -> None:
    assert_parity(replace(case, compile=True), timeout=110)


def _graphs(ranks: int, components: list[str]) -> tuple[list[int], float]:
    """Graphs compiled by the end of each of three steps and one evaluation, with three chunks of logits a step."""
    compiled: Counter[str] = Counter()

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled["graphs"] += 1
        return graph

    case = Case(Topology(tp=ranks), args=ARGS, valid=(64, 64))
    model = build_parallel_model(
        case.args,
        Meshes(case.topology, "cpu"),
        DataParallel(0),
        ActivationCheckpoint(),
        Compile(enable=True, components=components, backend=count),  # type: ignore[arg-type]
        torch.float32,
        seed=5,
        device=torch.device("cpu"),
    )
    assert model.output is not None and isinstance(model.output.cross_entropy, ChunkedCrossEntropy)
    model.output.cross_entropy.chunk_bytes = (
        50 * 4 * -(-ARGS.vocab_size // ranks)
    )  # 128 tokens: 43, 43 and 42
    batch = micro_batches(case, 0, 0)[0]
    seen = []
    for _ in range(3):
        loss, _ = model(batch.tokens, batch.positions, None, batch.labels)
        loss.backward()
        seen.append(compiled["graphs"])
    with torch.no_grad():
        evaluated, _ = model(batch.tokens, batch.positions, None, batch.labels)
    assert float(evaluated) == pytest.approx(float(loss.detach()), rel=1e-6)
    return seen, float(loss.detach())


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_graphs_are_there_after_the_first_step(ranks: int) -> None:
    without = run_ranks(_graphs, ranks, ranks, ["model"])
    compiled = run_ranks(_graphs, ranks, ranks, ["model", "loss"])
    for (plain, expected), (seen, loss) in zip(without, compiled, strict=True):
        assert len(set(seen)) == len(set(plain)) == 1, "compiled again after the first step"
        assert seen[0] > plain[0], "the loss was not compiled"
        assert loss == pytest.approx(expected, rel=1e-6)
