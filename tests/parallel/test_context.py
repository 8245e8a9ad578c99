"""Cut 3 in a whole step against one process: methods, balancers, documents, data and tensor cuts beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity import TINY, Case, assert_parity, reference
from titan5d.parallel.context import ContextParallel
from titan5d.topology import Topology

METHODS = ("ring", "allgather", "ulysses")


@pytest.mark.parametrize("balancer", ["headtail", "none"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [2, 4])
def test_methods(cp: int, method: str, balancer: str) -> None:
    context = ContextParallel(method, balancer)  # type: ignore[arg-type]
    assert_parity(Case(Topology(cp=cp), stage=2, accumulation=2, documents=True, steps=2, lr=0.1, context=context))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_beside_data(stage: int) -> None:
    assert_parity(Case(Topology(dp_shard=2, cp=2), stage=stage, accumulation=2, documents=True, steps=2, lr=0.1))


def test_one_document_a_row_and_eight_ranks() -> None:
    assert_parity(Case(Topology(cp=8), stage=3, steps=2, lr=0.1))


@pytest.mark.parametrize("method", METHODS)
def test_beside_tensor(method: str) -> None:
    context = ContextParallel(method)  # type: ignore[arg-type]
    assert_parity(Case(Topology(cp=2, tp=2), stage=2, documents=True, steps=2, lr=0.1, context=context))


def test_all_of_data_context_tensor() -> None:
    assert_parity(Case(Topology(dp_replicate=2, cp=2, tp=2), stage=2, documents=True, max_norm=0.1, steps=2))


def test_recompute_and_compile() -> None:
    case = Case(Topology(dp_shard=2, cp=2), stage=3, documents=True, steps=2, lr=0.1)
    assert_parity(replace(case, recompute="full"))
    assert_parity(replace(case, compile=True), timeout=100)


@pytest.mark.parametrize("place", [0, 63])
@pytest.mark.parametrize("cp", [2, 4])
def test_the_only_target_at_either_end(cp: int, place: int) -> None:
    """Case 006: a count over one rank's tokens alone would halve the gradient at every doubling of the degree."""
    case = Case(Topology(cp=cp), stage=2, valid=(1,), only_target=place)
    assert_parity(case)
    assert reference(case).norms[0] > 0


def test_multi_query_heads() -> None:
    assert_parity(Case(Topology(cp=4), stage=2, args=replace(TINY, n_kv_heads=1), documents=True))
