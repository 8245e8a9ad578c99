"""Cut 1 against one process: every ZeRO stage, HSDP, accumulation, unequal rows, and ranks without any target."""

from __future__ import annotations

import pytest
import torch

from tests.parity import TINY_TIED, UNEQUAL, Case, assert_parity, layout, reference
from titan5d.topology import Topology

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_stages(stage: int, ranks: int, accumulation: int) -> None:
    assert_parity(
        Case(Topology(dp_shard=ranks), stage=stage, accumulation=accumulation, documents=True, steps=2, lr=0.1)
    )


@pytest.mark.parametrize("stage", STAGES)
def test_four_ranks_with_a_clip_that_bites(stage: int) -> None:
    assert_parity(Case(Topology(dp_shard=4), stage=stage, accumulation=2, max_norm=0.1, steps=2))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_four_ranks(stage: int, accumulation: int) -> None:
    case = Case(Topology(dp_shard=4), stage=stage, accumulation=accumulation, valid=2 * UNEQUAL)
    assert_parity(case)


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hsdp(shape: tuple[int, int], stage: int) -> None:
    replicate, shard = shape
    accumulation = 8 // (replicate * shard)
    assert_parity(Case(Topology(dp_replicate=replicate, dp_shard=shard), stage, accumulation, steps=2, lr=0.1))


def test_replicas_only() -> None:
    assert_parity(Case(Topology(dp_replicate=4), stage=0, accumulation=2, steps=2, lr=0.1))


def test_regrouped_shards_after_forward() -> None:
    assert_parity(Case(Topology(dp_shard=4), stage=3, reshard_degree=2, accumulation=2, steps=2, lr=0.1))


@pytest.mark.parametrize("stage", STAGES)
def test_tied_embedding(stage: int) -> None:
    assert_parity(Case(Topology(dp_shard=2), stage=stage, accumulation=2, args=TINY_TIED, steps=2, lr=0.1))


@pytest.mark.parametrize("stage", STAGES)
def test_a_micro_batch_and_a_rank_without_targets(stage: int) -> None:
    # rows 0-3 are rank 0's, 4-7 rank 1's: rank 0 has no target at all, rank 1's first micro-batch has none
    assert_parity(Case(Topology(dp_shard=2), stage=stage, accumulation=2, valid=(0, 0, 0, 0, 0, 0, 7, 30)))


def test_a_batch_without_targets_changes_nothing() -> None:
    case = Case(Topology(dp_shard=2), stage=2, accumulation=2, valid=(0,) * 8)
    for outcome in layout(case):
        assert outcome.losses == outcome.norms == [0.0] and not outcome.gradients
        untouched = reference(Case(valid=(0,) * 8))
        assert all(torch.equal(outcome.weights[name], untouched.weights[name]) for name in untouched.weights)


def test_loss_is_the_sum_over_all_tokens_by_one_count() -> None:
    """Case 001: rows of 3, 61, 1, ... targets; a mean of row means would be far off."""
    alone = [
        reference(Case(valid=tuple(n if row == i else 0 for row, n in enumerate(UNEQUAL)))).losses[0]
        for i in range(len(UNEQUAL))
    ]
    expected = sum(n * loss for n, loss in zip(UNEQUAL, alone, strict=True)) / sum(UNEQUAL)
    whole = reference(Case())
    assert whole.losses[0] == pytest.approx(expected, rel=1e-6)
    assert whole.max_losses[0] == pytest.approx(max(alone), rel=1e-6)
    assert abs(sum(alone) / 8 - expected) > 1e-3  # the wrong formula would be seen


def test_ranks_start_and_stay_equal() -> None:
    """Case 090: all replicas hold the same weights, bit for bit; layers differ from each other."""
    outcomes = layout(Case(Topology(dp_replicate=2, dp_shard=2), stage=3, steps=3, lr=0.1))
    for outcome in outcomes[1:]:
        assert all(torch.equal(outcome.weights[name], outcomes[0].weights[name]) for name in outcome.weights)
    weights = outcomes[0].weights
    assert not torch.equal(weights["layers.0.attention.wq.weight"], weights["layers.1.attention.wq.weight"])
