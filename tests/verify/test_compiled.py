"""torch.compile by blocks under several cuts: one graph for all blocks, no graph break, none after step 2."""

from __future__ import annotations

import pytest

from tests.verify.matrix import assert_equal

COMPILED = ("--compile.enable", "true", "--compile.components", '["model"]', "--validation.enable", "false")


def graphs(words: tuple[str, ...], layout: str) -> int:
    """How many graphs a rank compiled, all other promises checked."""
    row = assert_equal((*words, *COMPILED), layout, layout)
    assert row.checks["graphs"].error == 0
    return int(row.checks["graphs"].where.split(", ")[-1].split()[0])


@pytest.mark.parametrize("layout", ["dp2", "cp2", "pp2"])
def test_one_graph_for_all_blocks(layout: str) -> None:
    assert graphs(("--config", "quickstart"), layout) == 1


def test_all_that_is_compiled_by_default_is_compiled_once() -> None:
    """Blocks and loss, training and evaluation."""
    words = ("--config", "quickstart", "--compile.enable", "true")
    assert assert_equal(words, "dp2", "dp2").checks["graphs"].error == 0


def test_whole_experts_compile_within_their_blocks() -> None:
    """Case 075. Each step sends other numbers of tokens to each expert."""
    assert graphs(("--config", "moe_debug"), "one") == 1


def test_experts_that_are_cut_compile_in_parts() -> None:
    """Attention and router, once each for all layers."""
    assert graphs(("--config", "moe_debug"), "dp2ep2") == 2


@pytest.mark.slow  # eight ranks compile
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_three_cuts(recompute: str) -> None:
    assert graphs(("--config", "quickstart", "--activation_checkpoint.mode", recompute), "dp2tp2cp2") == 1
