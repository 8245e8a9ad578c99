"""A pipeline whose stages sleep instead of computing: many ranks run truly side by side, however few the cores."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan5d.config.pipeline_plan import PipelinePlan
from titan5d.metrics.pipeline_trace import PipelineTrace
from titan5d.models.decoder import NoCopies
from titan5d.parallel.deferred_weights import WeightGradientStore
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline_schedule import Pipeline, StageInput
from titan5d.schedules import catalog
from titan5d.schedules.simulate import StageTimes, play, simulate
from titan5d.schedules.table import Schedule
from titan5d.schedules.timeline import Timeline
from titan5d.topology import Topology

DIM, SEQ = 4, 8


class _Sleep(torch.autograd.Function):
    """x, after `f` seconds; its gradient after `b`, and `w` more at once or put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, store: WeightGradientStore, f: float, b: float, w: float) -> Tensor:
        ctx.store, ctx.b, ctx.w = store, b, w
        time.sleep(f)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        store, w = ctx.store, ctx.w
        time.sleep(ctx.b)
        if store.is_putting_off:
            store.put_off(lambda: time.sleep(w))
        else:
            time.sleep(w)
        return grad, None, None, None, None


class SleepingStage(nn.Module):
    """A stage of a decoder, as the runtime calls it."""

    def __init__(self, first: bool, last: bool, store: WeightGradientStore, *times: float) -> None:
        super().__init__()
        self.first, self.last, self.store, self.times = first, last, store, times
        self.gradient_sum = NoCopies()

    def forward(self, x: Tensor, positions: Tensor, ids: Tensor | None, labels: Tensor | None = None) -> Any:
        if self.first:
            x = torch.ones(*x.shape, DIM, requires_grad=True)
        out = _Sleep.apply(x, self.store, *self.times)
        return (out.sum(), out.detach().sum((1, 2))) if self.last else out


class Measured(NamedTuple):
    timeline: Timeline
    held: int


def sleeping_pipeline(schedule: Schedule, meshes: Meshes, f: float, b: float, w: float) -> Pipeline:
    """`f`, `b`, `w`: seconds of one micro-batch in all stages of a rank."""
    assert meshes.pipeline is not None
    store, rank = WeightGradientStore(), meshes.pipeline.rank
    mine = schedule.stages_of_rank(rank)
    times = [time / len(mine) for time in (f, b, w)]
    stages = {s: SleepingStage(s == 0, s == schedule.n_stages - 1, store, *times) for s in mine}
    model: Any = SimpleNamespace(
        args=SimpleNamespace(dim=DIM, tie_embeddings=False), weight_gradients=store, stages=stages
    )
    cpu = torch.device("cpu")
    pipeline = Pipeline(model, PipelinePlan(schedule, (), 1), meshes.pipeline, 1, torch.float32, cpu, 0)
    pipeline.trace = PipelineTrace(schedule, meshes.pipeline.down, cpu, Path())
    return pipeline


def measure(
    names: tuple[str, ...], ranks: int, microbatches: int, seconds: float, tries: int
) -> dict[str, Measured]:
    """The shortest of some steps of each schedule, F = I = W = seconds."""
    meshes = Meshes(Topology(pp=ranks), "cpu")
    zeros = torch.zeros(1, SEQ, dtype=torch.int64)
    best: dict[str, Measured] = {}
    for _ in range(tries):
        for name in names:
            schedule = catalog.build(name, ranks, catalog.default_chunks(name), microbatches)
            pipeline = sleeping_pipeline(schedule, meshes, seconds, seconds, seconds)
            batches = [StageInput(zeros, zeros, None, zeros) for _ in range(microbatches)]
            loss, rows = pipeline.step(batches, lambda loss_sum: loss_sum)
            assert float(loss) == DIM * SEQ * microbatches and rows.shape == (microbatches,)
            assert isinstance(pipeline.trace, PipelineTrace)
            timeline = pipeline.trace.timeline()
            if name not in best or timeline.makespan < best[name].timeline.makespan:
                best[name] = Measured(timeline, pipeline.most_held)
    return best


def simulated(timeline: Timeline, seconds: float, comm: float = 0.0) -> float:
    return simulate(timeline.schedule, StageTimes.even(timeline.schedule, seconds, seconds, seconds, comm)).makespan


def replayed(timeline: Timeline, comm: float) -> float:
    """The simulation's makespan, each slot taking as long as it did in the run."""
    took = {span.slot: span.end - span.start for row in timeline.spans for span in row}
    spans = play(timeline.schedule, took.__getitem__, comm)
    return max(row[-1].end for row in spans)
