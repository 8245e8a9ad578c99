"""The same model under every two cuts, the threes that people run, and all five: through `titan5d verify`'s own run.

Uneven targets, documents, padding, accumulation and clipping are on in all of them. Case 007 (the logged loss under
tensor and context ranks together) is among them: what metrics.jsonl holds is compared.
"""

from __future__ import annotations

import pytest

from tests.verify.matrix import assert_equal, case
from titan5d.verify.case import reference_case
from titan5d.verify.layouts import all_pairs
from titan5d.verify.shrink import MAX_NORM

DENSE = ("--config", "quickstart", "--parallelism.zero_stage", "2")
EXPERTS = ("--config", "moe_debug", "--moe.bias_update_rate", "0.001", "--moe.capacity_factor", "1.25")
PAIRS = [str(cuts) for cuts in all_pairs(False)]
EXPERT_PAIRS = [str(cuts) for cuts in all_pairs(True)[15:]]
TRIPLES = ["dp2tp2pp2", "dp2tp2cp2", "r2dp2tp2"]
EXPERT_TRIPLES = ["dp4pp2ep2", "dp2tp2ep2", "r2dp2tp2ep4", "dp2cp2etp2"]
FIVE = "dp2tp2cp2pp2"
"""And `ep4`, folded into dp, cp and tp: 16 ranks."""


@pytest.mark.parametrize("layout", PAIRS)
def test_two_cuts(layout: str) -> None:
    """Replicas alone have nothing to shard, so the stage of a dense run is the config's own choice."""
    assert_equal(DENSE[:2], ", ".join(PAIRS), layout)


@pytest.mark.parametrize("layout", EXPERT_PAIRS)
def test_two_cuts_with_experts(layout: str) -> None:
    assert_equal(EXPERTS, ", ".join(EXPERT_PAIRS), layout)


@pytest.mark.parametrize("layout", TRIPLES)
def test_three_cuts(layout: str) -> None:
    assert_equal(DENSE, ", ".join(TRIPLES), layout)


@pytest.mark.parametrize("layout", EXPERT_TRIPLES)
def test_three_cuts_with_experts(layout: str) -> None:
    assert_equal(EXPERTS, ", ".join(EXPERT_TRIPLES), layout)


def test_sizes_that_do_not_divide() -> None:
    """Cases 021 and 024: 259 rows of vocabulary over 2 ranks; 3 experts, 30 wide, over 8."""
    sizes = ("--model.vocab_size", "259", "--model.n_experts", "3", "--model.moe_ffn_dim", "30")
    assert_equal(("--config", "moe_debug", *sizes), "dp4tp2", "dp4tp2")


@pytest.mark.parametrize(
    ("words", "layout"), [(DENSE, FIVE), (EXPERTS, f"{FIVE}ep4")], ids=["dense", "experts"]
)
def test_five_cuts(words: tuple[str, ...], layout: str) -> None:
    assert_equal(words, layout, layout)


def test_the_case_is_a_hard_one() -> None:
    """It clips, accumulates, has rows of very different targets, several documents and padding."""
    small, expected = case(DENSE[:2], ", ".join(PAIRS))
    training = reference_case(small).config.training
    assert training.document_mask and training.global_batch_size >= 4 * small.config.training.local_batch_size
    for line in expected.metrics:
        assert float(line["grad_norm"]) > 2 * MAX_NORM  # type: ignore[arg-type]
        assert 0 < int(line["valid_tokens"]) < 0.7 * int(line["tokens"])  # type: ignore[arg-type]
    assert len(expected.metrics) == 3 and "validation_loss" in expected.metrics[-1]
