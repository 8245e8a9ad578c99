"""Cut 4 against one process: loss, every gradient, the norm, weights, on pairs of schedule, layout and other cuts.

The whole matrix is in test_pipeline_matrix.py (slow)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parity import TINY, TINY_TIED, UNEQUAL, Case, assert_parity, layout, reference
from titan5d.config.pipeline_plan import PipelinePlan
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import RankFailed, run_ranks
from titan5d.models.args import Balance
from titan5d.models.decoder import Decoder
from titan5d.parallel import pipeline
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline import build_stage
from titan5d.schedules import catalog
from titan5d.schedules.stages import model_parts, parse_layout, split_by_weight
from titan5d.topology import Topology

BALANCED = Balance(aux_loss_coefficient=0.05, z_loss_coefficient=0.01)
LAYERS_7 = replace(TINY, n_layers=7)

CASES = {
    # case 010: a clip that bites, over stages, and with the parameters of each stage sharded
    "1F1B, clip": Case(Topology(pp=2), stage=0, max_norm=0.1, steps=2),
    "1F1B, ZeRO-1, accumulation": Case(Topology(pp=2, dp_shard=2), stage=1, accumulation=2, max_norm=0.1, steps=2),
    "1F1B, ZeRO-3, tied": Case(Topology(pp=2, dp_shard=2), stage=3, args=TINY_TIED, steps=2, max_norm=0.1),
    "GPipe, replicas, two rows a micro-batch": Case(
        Topology(pp=2, dp_replicate=2), stage=0, schedule="GPipe", microbatch_size=2, documents=True
    ),
    "LoopedBFS, layout": Case(
        Topology(pp=2), stage=0, schedule="LoopedBFS", args=LAYERS_7, layout="E|t*4|t|t*2,N,H", microbatch_size=2
    ),
    # case 020: 7 layers on 4 stages
    "Interleaved1F1B, 7 layers": Case(Topology(pp=2), stage=0, schedule="Interleaved1F1B", args=LAYERS_7),
    "InterleavedZeroBubble, ZeRO-2": Case(
        Topology(pp=2, dp_shard=2), stage=2, schedule="InterleavedZeroBubble", steps=2
    ),
    # case 018: the split backward must not add a tied weight's gradient twice; both ends on one rank
    "ZBVZeroBubble, tied, clip": Case(
        Topology(pp=2), stage=0, schedule="ZBVZeroBubble", args=TINY_TIED, steps=2, max_norm=0.1
    ),
    "ZBVZeroBubble, HSDP, recompute": Case(
        Topology(pp=2, dp_shard=2, dp_replicate=2), stage=3, schedule="ZBVZeroBubble", recompute="full", steps=2
    ),
    "ZBVZeroBubble, compiled, documents": Case(
        Topology(pp=2), stage=0, schedule="ZBVZeroBubble", compile=True, documents=True, recompute="selective"
    ),
    "DualPipeV, 4 ranks, 7 layers, 9 micro-batches": Case(
        Topology(pp=4), stage=0, schedule="DualPipeV", args=LAYERS_7, valid=(*UNEQUAL, 5), documents=True
    ),
    "ZBVZeroBubble, tensor and context": Case(
        Topology(pp=2, tp=2, cp=2), stage=1, schedule="ZBVZeroBubble", documents=True
    ),
    "ZBVZeroBubble, experts on two ranks": Case(
        Topology(pp=2, dp_shard=2, ep=2),
        stage=2,
        schedule="ZBVZeroBubble",
        args=replace(
            TINY, n_experts=4, top_k=2, moe_ffn_dim=32, n_shared_experts=1, n_dense_layers=1, balance=BALANCED
        ),
    ),
    # fewer key/value heads than tensor ranks: weights that ranks share by rows are put off, too
    "InterleavedZeroBubble, tensor, one KV head": Case(
        Topology(pp=2, tp=2),
        stage=0,
        schedule="InterleavedZeroBubble",
        args=replace(TINY, n_kv_heads=1, attention_bias=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str) -> None:
    assert_parity(CASES[name], timeout=120)


def test_one_norm_over_all_stages_clips_every_stage() -> None:
    """Cases 010 and 020: 5 layers on 4 ranks; all weights together move by lr x max_norm, whatever the stage."""
    case = Case(Topology(pp=4), stage=0, args=replace(TINY, n_layers=5), max_norm=0.1, lr=2.0)
    assert_parity(case, timeout=120)
    before = reference(replace(case, lr=0.0)).weights
    for outcome in layout(case, 120):
        assert outcome.norms[0] > 0.2  # it clips
        moved = sum(float((outcome.weights[name] - weight).square().sum()) for name, weight in before.items())
        assert moved**0.5 == pytest.approx(2.0 * 0.1, rel=1e-4)


def test_a_missing_gradient_exchange_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tied case can fail: without the exchange the two copies drift apart."""
    monkeypatch.setattr("titan5d.parallel.pipeline_schedule.sum_tied_gradients", lambda *_: None)
    with pytest.raises(RankFailed, match="AssertionError"):
        assert_parity(Case(Topology(pp=2), stage=0, args=TINY_TIED), timeout=120)


def test_a_tied_gradient_counted_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pipeline.PipelineModel, "counted_parameters", lambda model: list(model.parameters())
    )
    with pytest.raises(AssertionError, match="gradient norm"):
        assert_parity(Case(Topology(pp=2), stage=0, args=TINY_TIED), timeout=120)


def local_parameters(schedule: str, tied: bool) -> tuple[dict[str, torch.Size], list[str]]:
    """(parameters of this rank by name, those its stages were built with)."""
    args = replace(LAYERS_7, tie_embeddings=tied)
    stages = split_by_weight(7, 4, 1, 1)
    plan = PipelinePlan(catalog.build(schedule, 2, 2, 2), stages, 1)
    model = build_parallel_model(
        args,
        Meshes(Topology(pp=2), "cpu"),
        DataParallel(0),
        ActivationCheckpoint(),
        Compile(),
        torch.float32,
        seed=5,
        device=torch.device("cpu"),
        pipeline=plan,
    )
    assert isinstance(model, pipeline.PipelineModel)
    in_stages = [name for stage in model.stages.values() for name, _ in stage.named_parameters()]
    assert list(model.state_dict()) == list(dict(model.named_parameters()))
    return {name: p.shape for name, p in model.named_parameters()}, in_stages


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_every_parameter_is_on_one_rank_under_its_own_name(schedule: str) -> None:
    ranks = run_ranks(local_parameters, 2, schedule, False, timeout=120)
    with torch.device("meta"):
        whole = {name: p.shape for name, p in Decoder(LAYERS_7).named_parameters()}
    found = [name for shapes, _ in ranks for name in shapes]
    assert sorted(found) == sorted(whole)  # case 020: none dropped, none twice
    assert {name: shape for shapes, _ in ranks for name, shape in shapes.items()} == whole
    for shapes, in_stages in ranks:
        assert sorted(in_stages) == sorted(shapes)
    first = {name for name in ranks[0][0] if not name.startswith("layers.")}
    ends = {"tok_embeddings.weight", "norm.weight", "output.weight"}
    assert first == (ends if schedule == "ZBVZeroBubble" else {"tok_embeddings.weight"})


def test_a_stage_is_the_model_without_the_rest() -> None:
    stage = build_stage(LAYERS_7, ("layers.3", "layers.4"))
    assert list(stage.layers) == ["3", "4"]
    assert stage.tok_embeddings is None and stage.norm is None and stage.output is None
    with pytest.raises(ValueError, match=r"the model has no layers\.7"):
        build_stage(LAYERS_7, ("layers.7",))


def test_stages_in_turn_are_the_model() -> None:
    """Without any ranks: the stages of a layout, one after the other, compute what the model computes."""
    torch.manual_seed(0)
    model = Decoder(LAYERS_7)
    model.init_buffers("cpu")
    tokens = torch.randint(256, (2, 16))
    h: torch.Tensor = tokens
    for names in parse_layout("E,t*3|t*2|t*2,N|H"):
        stage = build_stage(LAYERS_7, names)
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()})
        stage.init_buffers("cpu")
        h = stage(h)  # type: ignore[assignment]
    assert torch.equal(h, model(tokens))
    assert len(model_parts(7)) == 10
