"""Models with experts through the whole training step: each layout has the losses, gradients, biases of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.models.test_moe import TINY_M
from tests.parity import TINY_LATENT, UNEQUAL, Case, assert_parity, layout, reference
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.data.dataset import MicroBatch
from titan5d.launch.local_ranks import run_ranks
from titan5d.models.args import Balance, ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.models.router import Router
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology
from titan5d.train.loss import count_step
from titan5d.train.routing import begin_step

BALANCED = Balance(aux_loss_coefficient=0.05, z_loss_coefficient=0.01, bias_update_rate=0.001)
ARGS = replace(TINY_M, n_layers=2, balance=BALANCED)
"""Losses with weight enough that a wrong scale is far outside of the tolerance."""


def case(topology: Topology | None = None, args: ModelArgs = ARGS, **more: Any) -> Case:
    return Case(topology or Topology(), args=args, steps=2, lr=0.1, **more)


@pytest.mark.parametrize(
    ("ranks", "accumulation", "stage", "kind"),
    [
        (1, 4, 0, "sequence"),
        (2, 1, 3, "sequence"),
        (2, 4, 1, "global_batch"),
        (4, 2, 2, "global_batch"),
        (2, 2, 0, "sequence"),
    ],
)
def test_data_parallel_and_accumulation(ranks: int, accumulation: int, stage: int, kind: Any) -> None:
    """Cases 065 and 069 in part: biases and loads are among what is compared."""
    args = replace(ARGS, balance=replace(BALANCED, aux_loss_kind=kind))
    assert_parity(case(Topology(dp_shard=ranks), args, accumulation=accumulation, stage=stage))


def test_latent_attention_sigmoid_scores_and_groups() -> None:
    assert_parity(case(Topology(dp_shard=2), replace(TINY_LATENT, balance=BALANCED), accumulation=2))


def test_hsdp() -> None:
    assert_parity(case(Topology(dp_replicate=2, dp_shard=2), stage=3))


@pytest.mark.parametrize(
    "more", [{"recompute": "full"}, {"recompute": "selective"}, {"compile": True}], ids=str
)
def test_recompute_and_compile(more: dict[str, Any]) -> None:
    assert_parity(case(Topology(dp_shard=2), accumulation=2, **more))


def test_capacity_does_not_depend_on_the_layout() -> None:
    args = replace(ARGS, balance=replace(BALANCED, capacity_factor=0.75, score_before_w2=True))
    assert_parity(case(Topology(dp_shard=2), args, accumulation=2))


def test_micro_batch_statistics_are_those_of_equal_micro_batches() -> None:
    """Four ranks without accumulation are one rank with four micro-batches."""
    args = replace(ARGS, balance=replace(BALANCED, aux_loss_kind="micro_batch"))
    ranks, alone = (
        layout(case(Topology(dp_shard=dp), args, accumulation=accumulation))[0]
        for dp, accumulation in ((4, 1), (1, 4))
    )
    whole = reference(case(Topology(), args))
    for name, expected in alone.gradients.items():
        scale = expected.abs().max()
        assert (ranks.gradients[name] - expected).abs().max() <= 1e-5 * scale, name
        if name.endswith("router.weight"):
            assert (whole.gradients[name] - expected).abs().max() > 1e-2 * scale


def factors_of_a_step(kind: Any) -> list[float]:
    """What a router divides by: 8 rows of 16 places, 20 of them padding, in 4 micro-batches on 2 ranks."""
    meshes = Meshes(Topology(dp_shard=2), "cpu")
    ids = torch.zeros(2, 16, dtype=torch.int32)
    ids[0, 11:] = -1
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens, tokens, ids, torch.arange(2), 32) for _ in range(2)]
    model = Decoder(replace(ARGS, balance=replace(BALANCED, aux_loss_kind=kind)))
    begin_step(model, count_step(batches, meshes.group("batch"), torch.device("cpu")))
    return model.routers()["1"].factors.tolist()


@pytest.mark.parametrize(
    ("kind", "parts"), [("sequence", 8), ("micro_batch", 4), ("global_batch", 8 * 16 - 20)]
)
def test_losses_are_divided_by_counts_of_the_whole_step(kind: str, parts: int) -> None:
    for factors in run_ranks(factors_of_a_step, 2, kind):
        assert factors == pytest.approx([0.05 / parts, 0.01 / (8 * 16 - 20)])


def test_the_losses_count() -> None:
    """Without them the gradient is another one, by far more than the tolerance of these tests."""
    plain = reference(case(args=replace(ARGS, balance=Balance())))
    balanced = reference(case())
    name = "layers.0.feed_forward.router.weight"
    difference = (plain.gradients[name] - balanced.gradients[name]).abs().max()
    assert difference > 0.1 * plain.gradients[name].abs().max()
    assert plain.losses[0] == balanced.losses[0]


def test_biases_move_once_a_step_and_loads_are_whole_counts() -> None:
    outcome = reference(case())
    for layer in range(2):
        load = outcome.weights[f"layers.{layer}.router.load"]
        assert load.sum() == len(UNEQUAL) * 64 * 2
        steps = outcome.weights[f"layers.{layer}.router.bias"] / 0.001
        assert (steps.round() - steps).abs().max() < 1e-3 and steps.abs().max() == pytest.approx(2)


def chosen_by_close_rows(stage: int) -> list[tuple[torch.dtype, torch.Tensor, torch.Tensor]]:
    """A model computing in bf16 whose router rows are (1 + e/1000) u: of each layer the type of the weights, the
    experts chosen and the sign of each token's product with u."""
    meshes = Meshes(Topology(dp_shard=2), "cpu")
    data = DataParallel(stage, param_dtype=torch.bfloat16)
    off = ActivationCheckpoint(), Compile()
    cpu = torch.device("cpu")
    model = build_parallel_model(ARGS, meshes, data, *off, torch.float32, seed=0, device=cpu)
    u = torch.randn(64, generator=torch.Generator().manual_seed(2))
    found: list[tuple[torch.dtype, torch.Tensor, torch.Tensor]] = []

    def look(
        router: Router, inputs: tuple[torch.Tensor, None], out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        assert inputs[0].dtype == torch.bfloat16
        found.append((out[1].dtype, out[0], inputs[0].float() @ u > 0))

    for router in model.routers().values():
        weight = router.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        local.data.copy_((1 + 0.001 * torch.arange(8)[:, None]) * u)
        router.register_forward_hook(look)
    with torch.no_grad():
        model(torch.arange(64)[None])
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_compute_keeps_router_weights_in_fp32(stage: int) -> None:
    """Case 070 under data parallelism: rows gathered in bf16 would be equal, and the choice no longer theirs."""
    for layers in run_ranks(chosen_by_close_rows, 2, stage):
        assert len(layers) == 2
        for dtype, experts, positive in layers:
            assert dtype == torch.float32
            expected = torch.where(positive[..., None], torch.tensor([7, 6]), torch.tensor([0, 1]))
            assert (experts == expected).all()
