"""Our tables against torch.distributed.pipelining: as fast as its own, lowered, read and executed by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from titan5d.launch.local_ranks import run_ranks
from titan5d.schedules import catalog
from titan5d.schedules.csv import write_csv
from titan5d.schedules.simulate import StageTimes, simulate
from titan5d.schedules.table import Action, Overlap, Schedule, Slot, plain_tuples

_Action = torch_schedules._Action
_Kind = torch_schedules._ComputationType
_Runtime: Any = torch_schedules._PipelineScheduleRuntime
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")


def to_torch(schedule: Schedule) -> dict[int, list[Any]]:
    """plain_tuples as torch's own actions: exactly what a runtime has to do to execute a table."""

    def action(stage: int, kind: str, microbatch: int | None, subs: Any = None) -> Any:
        inner = tuple(action(*sub) for sub in subs) if subs else None
        return _Action(stage, _Kind(kind), microbatch, inner)

    return {rank: [action(*plain) for plain in row] for rank, row in plain_tuples(schedule).items()}


def from_torch(name: str, order: dict[int, list[Any]], rank_of_stage: tuple[int, ...], m: int) -> Schedule:
    def slot(action: Any) -> Slot:
        if action.sub_actions is not None:
            forward, backward = (slot(sub) for sub in action.sub_actions)
            assert isinstance(forward, Action) and isinstance(backward, Action)
            return Overlap(forward, backward)
        return Action(action.stage_index, action.computation_type.value, action.microbatch_index)

    rows = tuple(tuple(slot(a) for a in order[rank] if a is not None) for rank in sorted(order))
    return Schedule(name, m, rank_of_stage, rows)


def torch_schedule(name: str, p: int, v: int, m: int) -> Schedule:
    """The table that torch's own class makes, which needs of its stages only their numbers."""
    stages = [
        SimpleNamespace(
            stage_index=i, num_stages=p * v, group_size=p, group_rank=0, submod=None, is_last=False
        )
        for i in range(v)
    ]
    made = torch_schedules.get_schedule_class(name)(stages, m)
    return from_torch(name, made.pipeline_order, catalog.rank_of_stage(name, p, v), m)


CASES = [
    *((name, p, v, m) for name in LOOPED for p in (2, 3, 4) for v in (2, 3) for m in (1, p, 2 * p, 3 * p)),
    *(("ZBVZeroBubble", p, 2, m) for p in (2, 3, 4, 8) for m in (1, p, 2 * p, 3 * p + 1)),
    *(("DualPipeV", p, 2, m) for p in (2, 3, 4, 8) for m in (2 * p, 2 * p + 1, 4 * p)),
]


@pytest.mark.parametrize(("name", "p", "v", "m"), CASES)
def test_never_slower_than_torchs_own_table(name: str, p: int, v: int, m: int) -> None:
    ours, theirs = catalog.build(name, p, v, m), torch_schedule(name, p, v, m)
    for f, b, w in ((1, 1, 1), (1, 1.3, 0.8), (1, 0.9, 1.2)):
        ours_time = simulate(ours, StageTimes.even(ours, f, b, w, comm=0.05)).makespan
        theirs_time = simulate(theirs, StageTimes.even(theirs, f, b, w, comm=0.05)).makespan
        assert ours_time <= theirs_time + 1e-9


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 1), (2, 3), (3, 7), (4, 3), (4, 8), (8, 5)])
def test_lowered_by_torch_and_sends_match_receives(name: str, p: int, m: int) -> None:
    """torch validates the table and works the messages out of it. Between any two ranks the sends of one are
    the receives of the other, in the same order: what point-to-point communication without tags needs."""
    v = catalog.default_chunks(name)
    schedule = catalog.build(name, p, v, m)
    order = to_torch(schedule)
    place = torch_schedules._validate_schedule(order, p, schedule.n_stages, m)
    assert tuple(place[stage] for stage in range(schedule.n_stages)) == schedule.rank_of_stage
    lowered = torch_schedules._add_send_recv(order, lambda stage: place[stage], schedule.n_stages)

    sent: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    received: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    for rank, row in lowered.items():
        for action in row:
            stage, microbatch = action.stage_index, action.microbatch_index
            kind = action.computation_type.value
            if kind.startswith("SEND"):
                target = stage + 1 if kind == "SEND_F" else stage - 1
                sent.setdefault((rank, place[target]), []).append((kind[-1], target, microbatch))
            elif kind.startswith("RECV"):
                source = stage - 1 if kind == "RECV_F" else stage + 1
                received.setdefault((place[source], rank), []).append((kind[-1], stage, microbatch))
    assert sent == received
    hops = sum(a != b for a, b in zip(schedule.rank_of_stage, schedule.rank_of_stage[1:], strict=False))
    assert sum(len(messages) for messages in sent.values()) == 2 * hops * m


@pytest.mark.parametrize("name", catalog.NAMES)
def test_torch_reads_our_csv(name: str, tmp_path: Any) -> None:
    schedule = catalog.build(name, 4, catalog.default_chunks(name), 9)
    write_csv(schedule, tmp_path / "table.csv")
    lines = (tmp_path / "table.csv").read_text().splitlines()
    order = {rank: [_Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(lines)}
    assert from_torch(name, order, schedule.rank_of_stage, 9) == schedule


LAYERS = 4
WIDTH = 6


def _layer(index: int) -> nn.Sequential:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    generator = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return layer


def _batch(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(2 * m, WIDTH, generator=generator), torch.randn(2 * m, WIDTH, generator=generator)


def _squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


def _gradients_of_every_schedule() -> dict[tuple[str, int, int], list[torch.Tensor | None]]:
    """On one of two ranks: (schedule, m, layer) -> the gradients torch's runtime makes with our table."""
    rank = torch.distributed.get_rank()
    found = {}
    for name in catalog.NAMES:
        for m in (1, 3, 4, 6):
            schedule = catalog.build(name, 2, catalog.default_chunks(name), m)
            per_stage = LAYERS // schedule.n_stages
            layers = {
                stage: [_layer(stage * per_stage + i) for i in range(per_stage)]
                for stage in schedule.stages_of_rank(rank)
            }
            stages = [
                PipelineStage(nn.Sequential(*modules), stage, schedule.n_stages, torch.device("cpu"))
                for stage, modules in layers.items()
            ]
            runtime = _Runtime(stages, m, loss_fn=_squared_error, scale_grads=False)
            runtime.pipeline_order = to_torch(schedule)
            runtime._prepare_schedule_with_comms(runtime.pipeline_order)
            inputs, targets = _batch(m)
            holds_first, holds_last = 0 in layers, schedule.n_stages - 1 in layers
            runtime.step(*([inputs] if holds_first else []), target=targets if holds_last else None)
            for stage, modules in layers.items():
                for i, module in enumerate(modules):
                    gradients = [parameter.grad for parameter in module.parameters()]
                    assert all(gradient is not None for gradient in gradients), (name, m, stage)
                    found[name, m, stage * per_stage + i] = gradients
    return found


def test_executed_by_torchs_runtime_equals_one_process() -> None:
    """Micro-batch counts that torch's own tables refuse (1F1B: 1 on 2 ranks, DualPipeV: below 4) included."""
    gradients = {}
    for of_rank in run_ranks(_gradients_of_every_schedule, 2, timeout=60):
        gradients.update(of_rank)
    assert len(gradients) == len(catalog.NAMES) * 4 * LAYERS
    for m in (1, 3, 4, 6):
        model = nn.Sequential(*(_layer(index) for index in range(LAYERS)))
        inputs, targets = _batch(m)
        torch.autograd.backward(_squared_error(model(inputs), targets))
        for name in catalog.NAMES:
            for index in range(LAYERS):
                wanted = [parameter.grad for parameter in model[index].parameters()]
                torch.testing.assert_close(gradients[name, m, index], wanted, rtol=1e-5, atol=1e-6)
