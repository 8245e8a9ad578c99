"""What each rank holds in a step, measured by the memory ledger, against plan/memory.py; and the table of the docs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.parallel.test_data_ledger import CPU, start
from tests.parity import TINY, Case
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.memory_ledger import MemoryLedger, MemoryUse
from titan5d.models.args import count_parameters
from titan5d.parallel.data import before_microbatch
from titan5d.plan.memory import StateBytes, head_activation_bytes, layer_activation_bytes, state_bytes
from titan5d.topology import Topology
from titan5d.train.loss import normalized
from titan5d.train.step import forward

COUNT = count_parameters(TINY)
P = COUNT.total
STEP_COUNTS = 4 * (3 + 9 * TINY.n_layers)  # Adam counts its steps in one fp32 number a tensor
FREQUENCIES = 4 * TINY.head_dim // 2  # of the rotary embedding, a buffer


@dataclass
class Held:
    """Bytes of one rank.

    Attributes:
        forward, backward: the most of each purpose, over all micro-batches.
        kept_gradients: the most between backward and the next forward or the update, buffers of reductions included.
        update: while the optimizer steps.
        peak: the fullest moment.
        sent: for weights and gradients, by the communication ledger.
    """

    forward: MemoryUse
    backward: MemoryUse
    kept_gradients: int
    update: MemoryUse
    peak: MemoryUse
    sent: float


def _held(case: Case) -> Held:
    run = start(case)
    run.step()  # from the second step on there is optimizer state
    held = Held(MemoryUse(), MemoryUse(), 0, MemoryUse(), MemoryUse(), 0.0)
    with MemoryLedger(run.model, run.optimizer) as ledger, run.ledger() as communication:
        for index, batch in enumerate(run.batches):
            ledger.highest = MemoryUse()
            before_microbatch(run.model, case.stage, last=index == len(run.batches) - 1)
            loss = normalized(forward(run.model, batch, CPU)[0], 100)
            held.forward, ledger.highest = held.forward.largest(ledger.highest), MemoryUse()
            loss.backward()
            held.backward = held.backward.largest(ledger.highest)
            now = ledger.now()
            held.kept_gradients = max(held.kept_gradients, now.gradients + now.buffers)
        ledger.highest = MemoryUse()
        run.optimizer.step()
        held.update, held.peak = ledger.highest, ledger.peak
    held.sent = communication.total().bytes
    return held


@cache
def held_by_ranks(case: Case) -> list[Held]:
    return run_ranks(_held, case.topology.world_size, case)


def predicted(case: Case) -> StateBytes:
    return state_bytes(
        P,
        COUNT.largest_unit,
        case.stage,
        case.topology.dp_shard,
        compute_bytes=case.dtype.itemsize,
        whole_gradients=case.stage <= 1 and case.accumulation > 1,
        working_copy=case.stage > 0,
        copies=case.topology.world_size > 1,
    )


CASES = {
    "one rank": Case(stage=0),
    **{f"stage {stage}, 2 ranks": Case(Topology(dp_shard=2), stage) for stage in range(4)},
    **{
        f"stage {stage}, 4 ranks, 2 micro-batches": Case(Topology(dp_shard=4), stage, 2) for stage in range(4)
    },
    **{
        f"stage {stage}, 2 ranks, 2 micro-batches, bf16": Case(
            Topology(dp_shard=2), stage, 2, dtype=torch.bfloat16
        )
        for stage in (1, 3)
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_its_closed_form(name: str) -> None:
    case = CASES[name]
    state = predicted(case)
    rows = len(case.valid) // case.topology.world_size // case.accumulation
    sizes = TINY, rows * case.seq_len, case.dtype.itemsize
    activations = TINY.n_layers * layer_activation_bytes(*sizes, "none") + head_activation_bytes(
        *sizes, 64 * 2**20
    )
    for held in held_by_ranks(case):
        assert held.update.weights == state.weights + FREQUENCIES
        assert held.update.optimizer == state.optimizer + STEP_COUNTS
        # FSDP2 lets go of what it sent for the first unit when it sends for the next micro-batch
        waiting = 4 * COUNT.embedding if case.stage >= 2 and case.accumulation > 1 else 0
        assert held.kept_gradients == pytest.approx(state.gradients + waiting, rel=0.02)
        assert held.backward.gathered == pytest.approx(state.gathered, rel=0.02)
        # what comes and goes with a unit
        assert held.forward.gathered <= state.gathered + state.buffers
        assert held.backward.gradients <= 1.05 * (state.gradients + state.buffers)
        assert held.backward.buffers <= state.buffers
        # the whole: an upper bound that is not far off
        assert 0.75 * (state.total + activations) <= held.peak.total <= state.total + activations


def test_static_bytes_of_case_092() -> None:
    """180,800 parameters x 16 bytes on one process; a quarter of it on each of 4 ranks, nothing padded."""
    for topology, stage, static in ((Topology(), 0, 2_892_800), (Topology(dp_shard=4), 3, 723_200)):
        for held in held_by_ranks(Case(topology, stage)):
            update = held.update
            held_static = update.weights + update.gradients + update.optimizer
            assert held_static == static + STEP_COUNTS + FREQUENCIES
            assert update.gathered == 0


def table_row(stage: int, held: Held) -> str:
    bytes_by_column = (
        held.update.weights,
        held.kept_gradients,
        held.update.optimizer,
        held.backward.gathered,
        held.peak.total,
        held.sent,
    )
    return " | ".join([f"| {stage}", *(f"{size / P:.2f}" for size in bytes_by_column)]) + " |"


@pytest.mark.parametrize("stage", range(4))
def test_the_table_of_the_docs_is_what_is_measured(stage: int) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data_parallel.md").read_text(encoding="utf-8")
    row = table_row(stage, held_by_ranks(Case(Topology(dp_shard=4), stage, 2))[0])
    assert row in page, f"docs/data_parallel.md lacks the measured row {row}"
