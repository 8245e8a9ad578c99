"""Two micro-batches of a DualPipeV slot in turns: the numbers of one process, and rows that travel beside compute."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models.test_moe import TINY_M
from tests.parity import (
    TINY_LATENT,
    Case,
    assert_parity,
    build_pipeline,
    layout,
    micro_batches,
    pipeline_plan,
    run_case,
)
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.phases import StepPhases
from titan5d.models import moe as moe_module
from titan5d.models.args import Balance, ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.models.moe import MoE
from titan5d.parallel import expert_dispatch, pipeline_schedule
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline_messages import message_lines
from titan5d.schedules.memory import peak_activations
from titan5d.topology import Topology
from titan5d.train.step import train_step

BALANCED = Balance(aux_loss_coefficient=0.05, z_loss_coefficient=0.01, bias_update_rate=0.001)
ARGS = replace(TINY_M, balance=BALANCED)
NO_SHARED = replace(ARGS, n_shared_experts=0, qk_norm=True)
"""As Qwen3's: no shared experts."""
TIMEOUT = 120.0


def case(args: ModelArgs = ARGS, stage: int = 2, **more: Any) -> Case:
    """8 micro-batches of a row for each of 2 data ranks, two steps. Names of topology's axes are degrees."""
    degrees = {"pp": 2, "dp_shard": 2, "ep": 2}
    degrees |= {name: more.pop(name) for name in Topology.__dataclass_fields__ if name in more}
    given: dict[str, Any] = {
        "valid": (3, 31, 1, 20, 32, 2, 7, 15) * 2,
        "schedule": "DualPipeV",
        "overlap": True,
    } | more
    return Case(Topology(**degrees), stage, args=args, seq_len=32, steps=2, lr=0.1, **given)


CASES = {
    "ZeRO-2": case(),
    "ZeRO-1, full recompute, no shared experts": case(NO_SHARED, stage=1, recompute="full"),
    "ZeRO-3, selective recompute, weights travel too": case(
        replace(ARGS, balance=replace(BALANCED, score_before_w2=True, capacity_factor=0.75)),
        stage=3,
        recompute="selective",
    ),
    "a stage without experts, another with fewer": case(replace(ARGS, n_layers=6, n_dense_layers=3)),
    "latent attention, groups, accumulation": case(
        replace(TINY_LATENT, n_layers=4, balance=BALANCED),
        accumulation=2,
        microbatch_size=2,
        valid=(3, 31, 1, 20) * 8,
    ),
    "compiled in parts": case(compile=True),
    "tensor ranks": case(dp_shard=1, tp=2, stage=0, valid=(3, 31, 1, 20, 32, 2, 7, 15)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "compiled in parts" else ()) for name in CASES],
)
def test_equals_one_process(name: str) -> None:
    assert_parity(CASES[name], timeout=TIMEOUT)


def both_ways(name: str) -> tuple[list[Any], list[Any]]:
    on = CASES[name]
    return layout(on, TIMEOUT), layout(replace(on, overlap=False), TIMEOUT)


@pytest.mark.parametrize(
    "name", ["ZeRO-3, selective recompute, weights travel too", "a stage without experts, another with fewer"]
)
def test_is_bit_by_bit_what_one_after_the_other_computes(name: str) -> None:
    for ours, theirs in zip(*both_ways(name), strict=True):
        assert (ours.losses, ours.max_losses, ours.norms) == (theirs.losses, theirs.max_losses, theirs.norms)
        for weight, expected in theirs.weights.items():
            assert torch.equal(ours.weights[weight], expected), weight


# That rows travel beside compute


EVENTS: list[str] = []


def note(event: str) -> None:
    """F or B: in a forward, or in a backward pass (where a forward may be repeated)."""
    EVENTS.append(("F " if torch._C._current_graph_task_id() == -1 else "B ") + event)


def watch(model: Decoder) -> None:
    """Notes what happens in overlapped slots: flights, and computing next to them. In this process, for good."""
    start, land, combine = expert_dispatch.Route.start, expert_dispatch.Flight.land, moe_module.combine
    overlap = pipeline_schedule._Pass._overlap

    def noted_start(self: Any, rows: Tensor, there: bool) -> Any:
        note("start")
        return start(self, rows, there)

    def noted_land(self: Any) -> Tensor:
        note("land")
        return land(self)

    def noted_combine(*args: Any) -> Tensor:
        out = combine(*args)
        note("combine")
        if out.requires_grad:
            out.register_hook(lambda grad: note("combine"))
        return out

    def noted_overlap(self: Any, slot: Any) -> None:
        EVENTS.clear()
        overlap(self, slot)
        SLOTS.append(" ".join(EVENTS))

    expert_dispatch.Route.start, expert_dispatch.Flight.land = noted_start, noted_land  # type: ignore[method-assign]
    moe_module.combine = noted_combine  # type: ignore[assignment]
    pipeline_schedule._Pass._overlap = noted_overlap  # type: ignore[method-assign]
    for block in model.layers.values():
        assert isinstance(block.feed_forward, MoE)
        parts: dict[str, Any] = {"attention": block.attention, "experts": block.feed_forward.experts}
        for name, part in parts.items():
            part.register_forward_hook(lambda *_, name=name: note(name))
            part.register_full_backward_hook(lambda *_, name=name: note(name))


SLOTS: list[str] = []


def overlapped_slots(one: Case) -> list[str]:
    """What happened in each of them, in order."""
    run_case(replace(one, prepare=watch, steps=1))
    return SLOTS


FORWARD = ["attention", "start", "land", "experts", "start", "land", "combine"]
BACKWARD = ["combine", "start", "land", "experts", "start", "land", "attention"]
TURNS = [(2, 2), (3, 3), (2, 2)]
"""How many events of a layer's forward and backward are in each of their turns."""


def in_turns() -> str:
    """The order of events of one layer each: turns end after a start."""
    events, forward, backward = [], iter(FORWARD), iter(BACKWARD)
    for of_forward, of_backward in TURNS:
        events += [f"F {next(forward)}" for _ in range(of_forward)]
        events += [f"B {next(backward)}" for _ in range(of_backward)]
    return " ".join(events)


def one_by_one() -> str:
    return " ".join([*(f"F {event}" for event in FORWARD), *(f"B {event}" for event in BACKWARD)])


@pytest.mark.parametrize("before_w2", [False, True])
def test_every_flight_has_compute_of_the_other_micro_batch_beside_it(before_w2: bool) -> None:
    """Between each start and its landing the other computes; without the key nothing does."""
    args = replace(ARGS, balance=replace(BALANCED, score_before_w2=before_w2))
    one = case(args, layout="E,t|t|t|t,N,H")
    for overlap in (True, False):
        for slots in run_ranks(overlapped_slots, 4, replace(one, overlap=overlap), timeout=TIMEOUT):
            assert len(slots) >= 4
            if before_w2:  # weights start after the rows, and land after them
                slots = [twins_as_one(slot) for slot in slots]
            assert set(slots) == {in_turns() if overlap else one_by_one()}


def twins_as_one(slot: str) -> str:
    events = slot.split(" ")
    pairs = [f"{who} {what}" for who, what in zip(events[::2], events[1::2], strict=True)]
    kept = [pair for index, pair in enumerate(pairs) if index == 0 or pair != pairs[index - 1]]
    return " ".join(kept)


def test_recompute_travels_beside_the_forward_and_the_rest_alone() -> None:
    """A backward that repeats its forward has more turns than the other micro-batch's forward."""
    for slots in run_ranks(
        overlapped_slots, 4, case(recompute="full", layout="E,t|t|t|t,N,H"), timeout=TIMEOUT
    ):
        for slot in slots:
            by = "".join(slot.split(" ")[::2])
            assert by == "FF" + "BBB" + "FFF" + "BBB" + "FF" + "B" * 7, slot


# What is counted in a slot


def held_and_phases(one: Case) -> tuple[int, int, dict[str, float], float]:
    """(activations held at most, those of the table, seconds by phase, seconds of the step) of a step."""
    device = torch.device("cpu")
    meshes = Meshes(one.topology, "cpu", has_experts=True)
    off = ActivationCheckpoint(), Compile()
    model = build_parallel_model(
        one.args, meshes, DataParallel(one.stage), *off, torch.float32, 5, device, pipeline=pipeline_plan(one)
    )
    pipeline = build_pipeline(one, meshes, model)
    assert pipeline is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phases = StepPhases(device)
    for block in model.layers.values():  # forward is to be told from backward
        assert isinstance(block.attention, nn.Module)
        block.attention.register_forward_hook(lambda *_: time.sleep(0.02))
        block.attention.register_full_backward_hook(lambda *_: time.sleep(0.03))
    batches = micro_batches(one, 0, meshes.dp_rank)
    begun = time.perf_counter()
    with phases.step():
        train_step(model, optimizer, batches, meshes, one.stage, 0.0, device, pipeline, phases)
    seconds = time.perf_counter() - begun
    expected = peak_activations(pipeline.schedule)[pipeline.groups.rank]
    return pipeline.most_held, expected, phases.metrics(), seconds


def test_what_is_held_and_the_time_of_each_phase_stay_true() -> None:
    """A phase has at least the time that was slept in it, however the two take turns, and together no more than all."""
    one = case(layout="E,t|t|t|t,N,H")
    for held, expected, times, seconds in run_ranks(held_and_phases, 4, one, timeout=TIMEOUT):
        assert held == expected
        stages, microbatches = 2, 8
        assert times["time_forward"] >= stages * microbatches * 0.02
        assert times["time_backward"] >= stages * microbatches * 0.03
        in_phases = sum(value for name, value in times.items() if "exposed" not in name)
        assert in_phases <= seconds * 1.05


def order_of_messages(one: Case) -> tuple[list[Any], list[Any]]:
    """What this rank sent to the other pipeline rank, in order; and the order of the table."""
    sent: list[Any] = []
    send = pipeline_schedule.Messages.send

    def noted_send(self: Any, message: Any, tensor: Tensor) -> None:
        sent.append(message)
        send(self, message, tensor)

    pipeline_schedule.Messages.send = noted_send  # type: ignore[method-assign]
    run_case(replace(one, steps=1))
    plan = pipeline_plan(one)
    assert plan is not None
    rank = dist.get_rank() // 2
    return sent, message_lines(plan.schedule)[rank, 1 - rank]


def test_messages_leave_in_the_order_of_the_table_whoever_ends_first() -> None:
    """On NCCL messages have no names. Stage 3 has no experts: its backward ends before the forward of stage 0."""
    one = case(layout="E,t|t|t,t|N,H")
    for sent, expected in run_ranks(order_of_messages, 4, one, timeout=TIMEOUT):
        assert sent == expected
