"""What tensor parallelism sends: exactly the closed forms of docs/tensor_parallel.md, by count and by bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo  # the first custom operator imports it: once here instead of on each forked rank
from torch.utils.flop_counter import FlopCounterMode

from tests.parity import TINY, Case, micro_batches
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.ledger import CommunicationLedger, Traffic
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.gradients import reduce_partial_gradients
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.tensor import TensorParallel
from titan5d.topology import Topology

ROWS, SEQ, FP32 = 4, 64, 4
STREAM = ROWS * SEQ * TINY.dim * FP32
"""Bytes of the whole residual stream of a micro-batch."""


def traffic(
    tp: int, layers: int, tensor: TensorParallel, recompute: str, compiled: bool
) -> dict[str, Traffic]:
    """op -> what one micro-batch's forward and backward send, and `norms` -> the sum of replicated gradients after."""
    case = Case(Topology(tp=tp), args=replace(TINY, n_layers=layers), valid=(64,) * ROWS)
    meshes = Meshes(case.topology, "cpu")
    model = build_parallel_model(
        case.args,
        meshes,
        DataParallel(0),
        ActivationCheckpoint(mode=recompute),  # type: ignore[arg-type]
        Compile(enable=compiled, backend="aot_eager"),
        torch.float32,
        seed=5,
        device=torch.device("cpu"),
        tensor=tensor,
    )
    batch = micro_batches(case, 0, 0)[0]
    with CommunicationLedger(meshes.groups()) as ledger:
        model(batch.tokens, batch.positions, None, batch.labels)[0].backward()
    with CommunicationLedger(meshes.groups()) as after:
        reduce_partial_gradients(model.parameters())
    found = {op: ledger.total("tp", op) for op in ("all_gather", "reduce_scatter", "all_reduce")}
    assert sum(traffic.count for traffic in found.values()) == ledger.total().count
    return found | {"norms": after.total()}


def assert_traffic(found: Traffic, count: int, tensor_bytes: float, share: float) -> None:
    assert (found.count, found.tensor_bytes, found.bytes) == (
        count,
        tensor_bytes,
        pytest.approx(share * tensor_bytes),
    )


@pytest.mark.parametrize(
    ("tp", "layers", "regather"), [(2, 1, False), (2, 3, True), (4, 3, False), (4, 1, True)]
)
def test_sequence_parallel(tp: int, layers: int, regather: bool) -> None:
    found = run_ranks(traffic, tp, tp, layers, TensorParallel(regather_input=regather), "none", False)[0]
    share = (tp - 1) / tp
    # a layer: 2 gathers forward, 2 backward, 2 more for what was not kept; the ends: embedding backward, head forward
    gathers = layers * (6 if regather else 4) + 2
    scalars = ROWS * SEQ * 3 * FP32 * tp  # the loss: three numbers a token from each rank, in one chunk
    assert_traffic(found["all_gather"], gathers + 1, gathers * STREAM + scalars, share)
    scatters = layers * 4 + 2
    assert_traffic(found["reduce_scatter"], scatters, scatters * STREAM, share)
    assert found["all_reduce"].count == 0
    # once a step and all at once: two norms a layer and the last one
    assert_traffic(found["norms"], 1, (2 * layers + 1) * TINY.dim * FP32, 2 * share)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_costs_the_closed_form(tp: int) -> None:
    one, two = (run_ranks(traffic, tp, tp, layers, TensorParallel(), "none", False)[0] for layers in (1, 2))
    a_layer = sum(two[op].bytes - one[op].bytes for op in ("all_gather", "reduce_scatter", "all_reduce"))
    # 8 T D q (t-1)/t, and 2 for the second gathers
    assert a_layer == pytest.approx((8 + 2) * STREAM * (tp - 1) / tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_without_sequence_parallelism(tp: int) -> None:
    layers, share = 2, (tp - 1) / tp
    found = run_ranks(traffic, tp, tp, layers, TensorParallel(sequence_parallel=False), "none", False)[0]
    assert_traffic(found["all_reduce"], 4 * layers + 2, (4 * layers + 2) * STREAM, 2 * share)
    assert_traffic(found["all_gather"], 1, ROWS * SEQ * 3 * FP32 * tp, share)  # the loss
    assert found["reduce_scatter"].count == found["norms"].count == 0


def test_gathered_logits_cost_the_vocabulary() -> None:
    plan = TensorParallel(loss_parallel=False)
    found = run_ranks(traffic, 2, 2, 1, plan, "none", False)[0]
    assert found["all_gather"].tensor_bytes == 8 * STREAM + ROWS * SEQ * TINY.vocab_size * FP32


@pytest.mark.parametrize(
    ("recompute", "regather", "gathers", "scatters"),
    [
        # outputs of products and their reduce-scatters are kept: the second forward sends nothing
        ("selective", True, 6, 4),
        # the second forward gathers twice and reduces attention's output; the feed-forward's nobody reads
        ("full", False, 6, 5),
        ("full", True, 8, 5),
    ],
)
def test_recompute(recompute: str, regather: bool, gathers: int, scatters: int) -> None:
    plan = TensorParallel(regather_input=regather)
    one, two = (run_ranks(traffic, 2, 2, layers, plan, recompute, False)[0] for layers in (1, 2))
    assert two["all_gather"].count - one["all_gather"].count == gathers
    assert two["reduce_scatter"].count - one["reduce_scatter"].count == scatters


def flops(tp: int) -> int:
    """Of one micro-batch's forward and backward on a rank, attention proper not counted."""
    case = Case(Topology(tp=tp), args=replace(TINY, n_layers=2), valid=(64,) * ROWS)
    rest = (DataParallel(0), ActivationCheckpoint(), Compile(), torch.float32, 5, torch.device("cpu"))
    model = build_parallel_model(case.args, Meshes(case.topology, "cpu"), *rest)
    batch = micro_batches(case, 0, 0)[0]
    with FlopCounterMode(display=False) as counter:
        model(batch.tokens, batch.positions, None, batch.labels)[0].backward()
    return counter.get_total_flops()


def test_products_are_shared_equally() -> None:
    assert run_ranks(flops, 4, 4)[0] * 4 == run_ranks(flops, 1, 1)[0] > 0


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_compiled_layer_sends_the_same(recompute: str) -> None:
    compiled, eager = (
        run_ranks(traffic, 2, 2, 2, TensorParallel(), recompute, compiled)[0] for compiled in (True, False)
    )
    assert compiled == eager
