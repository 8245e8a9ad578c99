"""Every schedule x 2 and 4 ranks x micro-batches (p, 2p, 3p, no multiple), each with other cuts beside it (slow).

    pytest -m slow tests/parallel/test_pipeline_matrix.py        about ten minutes on two cores
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity import TINY, TINY_TIED, UNEQUAL, Case, assert_parity
from titan5d.schedules import catalog
from titan5d.topology import Topology

BESIDE = (
    {"topology": {}, "stage": 0},
    {"topology": {"dp_shard": 2}, "stage": 1},
    {"topology": {"tp": 2}, "stage": 0, "documents": True},
    {"topology": {"dp_shard": 2}, "stage": 2, "recompute": "selective"},
    {"topology": {"cp": 2}, "stage": 1, "documents": True},
    {"topology": {"dp_shard": 2}, "stage": 3, "recompute": "full"},
    {"topology": {"dp_replicate": 2}, "stage": 0},
)
MODELS = (
    replace(TINY, n_layers=6),
    replace(TINY, n_layers=9),
    replace(TINY_TIED, n_layers=7),
    replace(TINY, n_layers=8, qk_norm=True),
)


def cases() -> list[Case]:
    found = []
    for name in catalog.NAMES:
        for ranks in (2, 4):
            for microbatches in (ranks, 2 * ranks, 3 * ranks, 2 * ranks + 1):
                turn = len(found)  # so that each schedule meets every neighbour and model
                beside = dict(BESIDE[turn % len(BESIDE)])
                topology = Topology(pp=ranks, **beside.pop("topology"))  # type: ignore[arg-type]
                rows = microbatches * topology.dp
                found.append(
                    Case(
                        topology,
                        schedule=name,
                        args=MODELS[turn % len(MODELS)],
                        valid=tuple(UNEQUAL[row % len(UNEQUAL)] for row in range(rows)),
                        accumulation=2 if microbatches % 2 == 0 and turn % 3 == 0 else 1,
                        max_norm=0.1 if turn % 2 else 0.0,
                        steps=2 if turn % 5 == 0 else 1,
                        **beside,  # type: ignore[arg-type]
                    )
                )
    return found


def label(case: Case) -> str:
    rows = len(case.valid) // case.topology.dp
    return f"{case.schedule}, {rows} micro-batches, {case.topology}, zero {case.stage}, {case.args.n_layers} layers"


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=label)
def test_parity(case: Case) -> None:
    assert_parity(case, timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_compiled(name: str, recompute: str) -> None:
    assert_parity(
        Case(Topology(pp=2), stage=0, schedule=name, compile=True, recompute=recompute, documents=True), timeout=110
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", catalog.SPLIT_BACKWARD)
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_beside_tensor_and_data(name: str, stage: int) -> None:
    assert_parity(
        Case(Topology(pp=2, tp=2, dp_shard=2), stage=stage, schedule=name, compile=True, documents=True), timeout=110
    )
