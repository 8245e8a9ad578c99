"""Models with experts through the whole training step: every layout has the losses, gradients, biases of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.models.test_moe import TINY_M
from tests.parity import UNEQUAL, Case, assert_parity, layout, reference
from titan5d.models.args import Balance, ModelArgs
from titan5d.topology import Topology

BALANCED = Balance(aux_loss_coefficient=0.05, z_loss_coefficient=0.01, bias_update_rate=0.001)
ARGS = replace(TINY_M, n_layers=2, balance=BALANCED)
"""Losses with weight enough that a wrong scale is far outside of the tolerance."""


def case(topology: Topology | None = None, args: ModelArgs = ARGS, **more: Any) -> Case:
    return Case(topology or Topology(), args=args, steps=2, lr=0.1, **more)


@pytest.mark.parametrize("kind", ["sequence", "global_batch"])
@pytest.mark.parametrize(("ranks", "accumulation", "stage"), [(1, 4, 0), (2, 1, 3), (2, 4, 1), (4, 2, 2), (2, 2, 0)])
def test_data_parallel_and_accumulation(ranks: int, accumulation: int, stage: int, kind: Any) -> None:
    """Cases 065 and 069 in part: biases and loads are among what is compared."""
    args = replace(ARGS, balance=replace(BALANCED, aux_loss_kind=kind))
    assert_parity(case(Topology(dp_shard=ranks), args, accumulation=accumulation, stage=stage))


def test_hsdp() -> None:
    assert_parity(case(Topology(dp_replicate=2, dp_shard=2), stage=3))


@pytest.mark.parametrize("more", [{"recompute": "full"}, {"recompute": "selective"}, {"compile": True}], ids=str)
def test_recompute_and_compile(more: dict[str, Any]) -> None:
    assert_parity(case(Topology(dp_shard=2), accumulation=2, **more))


def test_capacity_does_not_depend_on_the_layout() -> None:
    args = replace(ARGS, balance=replace(BALANCED, capacity_factor=0.75, score_before_w2=True))
    assert_parity(case(Topology(dp_shard=2), args, accumulation=2))


def test_micro_batch_statistics_are_those_of_equal_micro_batches() -> None:
    """Four ranks without accumulation are one rank with four micro-batches."""
    args = replace(ARGS, balance=replace(BALANCED, aux_loss_kind="micro_batch"))
    ranks, alone = (
        layout(case(Topology(dp_shard=dp), args, accumulation=accumulation))[0] for dp, accumulation in ((4, 1), (1, 4))
    )
    whole = reference(case(Topology(), args))
    assert ranks.norms == pytest.approx(alone.norms, rel=1e-5)
    assert abs(ranks.norms[0] - whole.norms[0]) > 1e-4 * whole.norms[0]
    for name, expected in alone.gradients.items():
        assert (ranks.gradients[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


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


def test_bf16_compute_keeps_router_weights_in_fp32() -> None:
    """Case 070 under FSDP: a weight gathered in bf16 would lose the last bits, and the choice with them."""
    for stage in (0, 3):
        outcome = layout(case(Topology(dp_shard=2), stage=stage, dtype=torch.bfloat16))[0]
        exact = reference(case())
        assert outcome.losses[0] == pytest.approx(exact.losses[0], rel=2e-3)
        name = "layers.0.feed_forward.router.weight"
        assert outcome.gradients[name].dtype == torch.float32
        error = (outcome.gradients[name] - exact.gradients[name]).abs().max()
        assert error <= 0.2 * exact.gradients[name].abs().max()
