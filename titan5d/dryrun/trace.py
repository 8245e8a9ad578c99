"""One optimizer step of one rank: built, given an optimizer state and run by the trainer's own functions."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import titan5d
from titan5d.config.check import Layout
from titan5d.config.schema import Config
from titan5d.data.dataset import MicroBatch
from titan5d.dryrun.collectives import CheckedLedger
from titan5d.dryrun.fake import DEVICE, FakeDevice, fake_world
from titan5d.dryrun.flops import FlopCount
from titan5d.dryrun.kinds import RankKind
from titan5d.dryrun.loads import assume_loads
from titan5d.dryrun.moments import Moment, Moments, TimedLedger
from titan5d.dryrun.sums import Sums
from titan5d.metrics.inside_operators import InsideOperators
from titan5d.metrics.ledger import Entry
from titan5d.metrics.memory_ledger import MemoryUse
from titan5d.models.args import ModelArgs
from titan5d.parallel.apply import allocate
from titan5d.parallel.mesh import Meshes
from titan5d.train.build import DTYPES, build_pipeline, build_without_memory
from titan5d.train.optimizer import build_optimizer
from titan5d.train.step import train_step


@dataclass(frozen=True)
class Assumed:
    """What a dry run cannot know.

    Attributes:
        documents: of equal length in each row.
        imbalance: load of the experts of this rank, 1 = their even share (loads.py).
    """

    documents: int = 1
    imbalance: float = 1.0


TRACED = 3
"""Micro-batches that are traced without a pipeline: the first has no gradients yet, the last may exchange them, and
all between do the same."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank does in a step, from the second step on.

    Attributes:
        peak: bytes at the fullest operator; peak_moment: where in the step it is.
        highest: of each purpose, at its own fullest operator.
        timeline: the fullest operator of each moment, in order.
        traffic: what the communication ledger counted.
        product_flops, attention_flops: of this rank, with what is computed again.
        garbage: bytes that only the garbage collector would free after the step; 0 in sound code.
        seconds: that the dry run took.
    """

    kind: RankKind
    peak: MemoryUse
    peak_moment: Moment
    highest: MemoryUse
    timeline: Mapping[Moment, MemoryUse]
    traffic: tuple[Entry, ...]
    product_flops: int
    attention_flops: int
    garbage: int
    seconds: float


class TraceError(Exception):
    """The step would fail on this rank. Names the rank, the moment, the error and the line of this package."""

    def __init__(self, kind: RankKind, moment: Moment, error: BaseException) -> None:
        self.kind, self.moment, self.error = kind, moment, error
        self.line = _line(error)
        what = f"{type(error).__name__}: {error}"
        super().__init__(f"error on {kind}, in {moment}: {what}\n  at {self.line}")


def _line(error: BaseException) -> str:
    """Where in this package the error was raised."""
    package = Path(titan5d.__file__).parent
    ours = Path(__file__).parent, package / "metrics"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [
        frame
        for frame in frames
        if package in Path(frame.filename).parents
        and not any(one in Path(frame.filename).parents for one in ours)
    ]
    frame = (inside or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


def trace_rank(
    config: Config, args: ModelArgs, layout: Layout, kind: RankKind, assumed: Assumed
) -> RankTrace:
    """Runs one step of a rank. Raises TraceError when that fails."""
    started, moment = time.monotonic(), Moment("building the model", "")
    moments: Moments | None = None
    try:
        with fake_world(kind.rank, layout.topology.world_size):
            device, meshes = (
                FakeDevice(),
                Meshes(layout.topology, DEVICE.type, has_experts=args.n_experts > 0),
            )
            cut = build_without_memory(config, args, layout, meshes)
            with device.building():
                for stage in cut.stages.values():
                    allocate(stage, DEVICE, cpu_offload=False)
            model = cut.model()
            assume_loads(model, assumed.imbalance)
            optimizer = build_optimizer(
                model.named_parameters(), config.optimizer, DTYPES[config.training.mixed_precision_param]
            )
            traced = layout.accumulation if layout.pipeline else min(layout.accumulation, TRACED)
            batches = assumed_batches(config, traced, assumed.documents)
            with device.running(), InsideOperators():
                moment = Moment("making the optimizer's state", "")
                step_on_zeros(model, optimizer)
                moment = Moment("connecting the stages", "")
                pipeline = build_pipeline(config, layout, meshes, model, DEVICE)
            moments = Moments(model, device)
            traffic, flops = CheckedLedger(meshes.groups()), FlopCount()
            begun: list[Sums] = []  # at the start of each micro-batch
            moments.before_forward = lambda: begun.append(Sums.of(traffic, flops))
            memory = TimedLedger(model, optimizer)
            with (
                without_collections(),
                device.running(),
                memory,
                flops,
                traffic,
                InsideOperators(),
                moments.watching(memory),
            ):
                train_step(
                    model,
                    optimizer,
                    batches,
                    meshes,
                    layout.zero_stage,
                    config.training.max_norm,
                    DEVICE,
                    pipeline,
                    moments,
                )
                held = memory.now().total
                gc.collect()
                garbage = held - memory.now().total
            sums = Sums.of(traffic, flops)
            if traced < layout.accumulation:
                sums = sums.repeated(begun[1], begun[2], layout.accumulation - traced)
    except Exception as error:
        raise TraceError(kind, (moments.failed or moments.now) if moments else moment, error) from error
    return RankTrace(
        kind,
        memory.peak,
        memory.peak_moment,
        memory.highest,
        memory.timeline,
        sums.traffic,
        sums.products,
        sums.attention,
        garbage,
        time.monotonic() - started,
    )


@contextmanager
def without_collections() -> Iterator[None]:
    """As in a run, where the garbage collector sleeps during steps: what is in a circle of references stays."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def step_on_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One update without gradients to speak of: the optimizer then has the state it has from the second step on."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def assumed_batches(config: Config, number: int, documents: int) -> list[MicroBatch]:
    """Micro-batches of a step: real tensors of the sizes of the run, every place with a target."""
    return [_micro_batch(config, documents) for _ in range(number)]


def _micro_batch(config: Config, documents: int) -> MicroBatch:
    shape = config.training.local_batch_size, config.training.seq_len
    index = torch.arange(shape[1])
    ids = index * documents // shape[1]
    first = torch.searchsorted(ids, torch.arange(documents))
    masked = documents > 1 and config.training.document_mask
    return MicroBatch(
        tokens=torch.zeros(shape, dtype=torch.int64),
        labels=torch.zeros(shape, dtype=torch.int64),
        positions=(index - first[ids] if masked else index).repeat(shape[0], 1),
        document_ids=ids.int().repeat(shape[0], 1) if masked else None,
        sample_ids=torch.arange(shape[0]),
        valid_tokens=shape[0] * shape[1],
    )
