"""Runs a schedule's table: this rank's row, slot by slot.

    F   hidden states in (received, or from a stage on this rank), forward, hidden states out
    B   gradient of the output in, backward, gradient of the input out
    I   the same, weight gradients put off (deferred_weights.py)
    W   the weight gradients that I put off
    F & B   of two micro-batches in one slot: one after the other, or in turns (turns.py)

All micro-batches of an optimizer step go through one pass, so accumulation adds no bubble. The table is the one that
is simulated, drawn and tested; it says what happens in which order, and waits follow from it (pipeline_messages.py).

Why not torch's own runtime: it splits backward by walking the graph, which compiled blocks refuse, recomputes
activations several times under checkpointing and loses gradients when FSDP reshards in between; it fixes shapes at
the first step; and its interfaces differ between versions. What is left of it without these is this page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from titan5d.config.pipeline_plan import PipelinePlan
from titan5d.data.dataset import IGNORE, MicroBatch
from titan5d.parallel.expert_dispatch import AllToAll
from titan5d.parallel.pipeline import PipelineModel, sum_tied_gradients
from titan5d.parallel.pipeline_data import before_backward, reduce_gradients
from titan5d.parallel.pipeline_messages import Messages, PipelineGroups, connect, needed_messages
from titan5d.parallel.turns import Turns
from titan5d.schedules.check import check
from titan5d.schedules.table import Action, Overlap, Schedule, Slot


class Trace(Protocol):
    """Notes when the slots of a training pass began and ended."""

    def start_step(self) -> None: ...

    def run_slot(self, slot: Slot, work: Callable[[], None]) -> None: ...


Phases = Callable[[str], AbstractContextManager[Any]]
"""Called with "forward", "backward" or "messages" around each: who wants to know what a rank is doing."""


@dataclass(frozen=True)
class StageInput:
    """What every stage gets of one micro-batch, on the device: (B, S) each, whole rows.

    tokens and labels are read by the first and the last stage; positions and document ids by all of them.
    """

    tokens: Tensor
    positions: Tensor
    document_ids: Tensor | None
    labels: Tensor


class Pipeline:
    """The pipeline that this rank is part of.

    Args:
        sequence_ranks: over how many ranks the hidden states of a row are cut between stages (context ranks, times
            tensor ranks with sequence parallelism).
        dtype: of the hidden states.
        zero_stage: of the data-parallel cut inside the stages.

    Attributes:
        most_held: most (stage, micro-batch) whose activations, or what weight gradients need of them, were held at
            once in the last step.
        trace: if set, every slot of a training pass runs through it.
        turns: in which the two micro-batches of an Overlap are computed, if `plan.overlaps_experts`.
    """

    def __init__(
        self,
        model: PipelineModel,
        plan: PipelinePlan,
        groups: PipelineGroups,
        sequence_ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        zero_stage: int,
    ) -> None:
        self.model, self.plan, self.groups = model, plan, groups
        self.schedule = plan.schedule
        check(self.schedule)
        self.sequence_ranks, self.dtype, self.device = sequence_ranks, dtype, device
        self.zero_stage = zero_stage
        self.loss_rank = self.schedule.rank_of_stage[-1]
        self.most_held = 0
        self.trace: Trace | None = None
        self.turns: Turns | None = None
        if plan.overlaps_experts:
            self.turns = Turns()
            for exchange in _exchanges(model):
                exchange.pause = self.turns.pause
        connect(groups, self.schedule, device)

    def step(
        self,
        micro_batches: Sequence[StageInput],
        scaled: Callable[[Tensor], Tensor],
        phases: Phases = nullcontext,
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of all micro-batches of an optimizer step.

        Args:
            scaled: sum of token losses of a micro-batch -> its share of the step's loss, which backward runs on.
            phases: told what is going on.

        Returns:
            (sum of token losses, fp32 scalar; by row, fp32 (rows,)), on every rank of the pipeline.
        """
        run = _Pass(self, self.schedule, micro_batches, scaled, phases)
        if self.trace is not None:
            self.trace.start_step()
        run.run(self.trace)
        self.most_held = run.most_held
        for stage in self.model.stages.values():
            stage.gradient_sum.finish()
        sum_tied_gradients(self.model, self.schedule, self.groups)
        return self._losses(run, micro_batches)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[StageInput]) -> Tensor:
        """Sum of token losses over the micro-batches, any number of them; on every rank of the pipeline."""
        run = _Pass(self, forward_table(self.schedule, len(micro_batches)), micro_batches, scaled=None)
        run.run(None)
        return self._losses(run, micro_batches)[0]

    def _losses(self, run: _Pass, micro_batches: Sequence[StageInput]) -> tuple[Tensor, Tensor]:
        """From the rank of the last stage to all."""
        rows = sum(batch.tokens.shape[0] for batch in micro_batches)
        both = torch.zeros(1 + rows, dtype=torch.float32, device=self.device)
        if self.groups.rank == self.loss_rank:
            order = range(len(micro_batches))
            both[0] = torch.stack([run.loss_sums[index] for index in order]).sum()
            both[1:] = torch.cat([run.row_sums[index] for index in order])
        dist.broadcast(both, group=self.groups.down, group_src=self.loss_rank)
        return both[0], both[1:]


def split_rows(batches: Iterable[MicroBatch], size: int) -> Iterator[MicroBatch]:
    """The same rows in micro-batches of `size`; what does not divide leaves a smaller one at the end of each."""
    for batch in batches:
        for first in range(0, batch.tokens.shape[0], size):
            rows = slice(first, first + size)
            labels, ids = batch.labels[rows], batch.document_ids
            yield MicroBatch(
                tokens=batch.tokens[rows],
                labels=labels,
                positions=batch.positions[rows],
                document_ids=None if ids is None else ids[rows],
                sample_ids=batch.sample_ids[rows],
                valid_tokens=int((labels != IGNORE).sum()),
            )


def stage_input(batch: MicroBatch, device: torch.device) -> StageInput:
    """The tensors of a micro-batch on the device."""
    ids = batch.document_ids
    return StageInput(
        tokens=batch.tokens.to(device, non_blocking=True),
        positions=batch.positions.to(device, non_blocking=True),
        document_ids=None if ids is None else ids.to(device, non_blocking=True),
        labels=batch.labels.to(device, non_blocking=True),
    )


def forward_table(schedule: Schedule, microbatches: int) -> Schedule:
    """A pass without backward over the same stages: each rank takes all micro-batches through one stage after the
    other. Works for any placement, since a stage only waits for lower ones."""
    rows = tuple(
        tuple(Action(stage, "F", index) for stage in schedule.stages_of_rank(rank) for index in range(microbatches))
        for rank in range(schedule.n_ranks)
    )
    return Schedule(schedule.name, microbatches, schedule.rank_of_stage, rows, forward_only=True)


def _exchanges(model: PipelineModel) -> Iterator[AllToAll]:
    for block in model.layers.values():
        exchange = getattr(block.feed_forward, "exchange", None)
        if isinstance(exchange, AllToAll):
            yield exchange


class _Pass:
    """One run through a table on this rank: what is held between its slots."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        micro_batches: Sequence[StageInput],
        scaled: Callable[[Tensor], Tensor] | None,
        phases: Phases = nullcontext,
    ) -> None:
        if len(micro_batches) != schedule.microbatches:
            raise ValueError(
                f"{len(micro_batches)} micro-batches for a table of {schedule.microbatches} ({schedule.name})"
            )
        self.pipeline, self.schedule = pipeline, schedule
        self.micro_batches, self.scaled, self.phases = micro_batches, scaled, phases
        self.rank = pipeline.groups.rank
        shapes = [_hidden_shape(pipeline, batch) for batch in micro_batches]
        # not a method of the pass: in a circle its inputs would wait for the garbage collector
        self.messages = Messages(
            schedule, pipeline.groups, shapes.__getitem__, pipeline.dtype, pipeline.device
        )
        self.local: dict[tuple[str, int, int], Tensor] = {}  # made and used by stages of this rank
        self.held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (stage, micro-batch) -> input, output
        self.last_of_stage = {action.stage: action for action in schedule.actions(self.rank)}
        self.loss_sums: dict[int, Tensor] = {}
        self.row_sums: dict[int, Tensor] = {}
        self.most_held = 0
        self.input_gradient: Tensor | None = None  # made, not yet handed over

    def run(self, trace: Trace | None) -> None:
        row = self.schedule.rows[self.rank]
        for index, slot in enumerate(row):
            # one slot ahead: what the next one needs travels while this one computes
            for soon in row[index : index + 2]:
                self.messages.expect(needed_messages(soon, self.rank, self.schedule))
            with self.phases("messages"):
                arrived = {
                    message: self.messages.receive(message)
                    for message in needed_messages(slot, self.rank, self.schedule)
                }
            self.local |= arrived
            if trace is None:
                self._run_slot(slot)
            else:
                trace.run_slot(slot, partial(self._run_slot, slot))
        with self.phases("messages"):
            self.messages.finish()

    def _run_slot(self, slot: Slot) -> None:
        if isinstance(slot, Overlap):
            self._overlap(slot)
        elif slot.kind == "F":
            with self.phases("forward"):
                self._forward(slot)
        else:
            with self.phases("backward"):
                self._weight_gradients(slot) if slot.kind == "W" else self._backward(slot)

    def _overlap(self, slot: Overlap) -> None:
        """A forward and a backward of two micro-batches in one slot, in turns that end where rows travel to experts and
        back: their all-to-alls hide behind each other's compute.

            forward    attention, router, send  .  .  .  .  .  .  .  .  experts, send back  .  .  .  .  .  .  combine
            backward    .  .  .  .  .  .  .  .  combine, send gradient  .  .  .  .  .  .  experts, send back  .  .  .

        Ranks that share experts have the same table and the same layers, hence the same turns, so they start their
        collectives in one order. A layer that exchanges nothing has no pause; who has pauses left when the other has
        ended goes on without. Messages leave in the order of the table, forward first: the receiver counts on it.

        Two micro-batches in one stage (a table from a file may have that) run one after the other: FSDP2 gathers and
        frees the weights of a block for one of them at a time.

        Raises whatever either raises; `Turns.run` ends the other.
        """
        turns, stages = self.pipeline.turns, (slot.forward.stage, slot.backward.stage)
        if turns is None or stages[0] == stages[1]:
            self._run_slot(slot.forward)
            self._run_slot(slot.backward)
            return
        turns.run(
            partial(self._forward, slot.forward),
            partial(self._differentiate, slot.backward),
            around=(partial(self.phases, "forward"), partial(self.phases, "backward")),
        )
        self._hand_over_gradient(slot.backward)

    def _forward(self, action: Action) -> None:
        stage, _, index = action
        if self.scaled is not None:
            waiting = self.pipeline.model.weight_gradients
            held = 1 + len(self.held) + (0 if waiting is None else len(waiting))
            self.most_held = max(self.most_held, held)
        batch = self.micro_batches[index]
        if stage == 0:
            x = batch.tokens
        else:
            x = self.local.pop(("F", stage - 1, index))
            x = x.detach().requires_grad_(self.scaled is not None)
        model = self.pipeline.model.stages[stage]
        if stage == self.schedule.n_stages - 1:
            loss_sum, row_sums = model(x, batch.positions, batch.document_ids, batch.labels)
            self.loss_sums[index], self.row_sums[index] = loss_sum.detach(), row_sums
            out = loss_sum if self.scaled is None else self.scaled(loss_sum)
        else:
            out = model(x, batch.positions, batch.document_ids)
            self._hand_over(("F", stage, index), out.detach())
        if self.scaled is not None:
            self.held[stage, index] = (x, out)

    def _backward(self, action: Action) -> None:
        self._differentiate(action)
        self._hand_over_gradient(action)

    def _differentiate(self, action: Action) -> None:
        stage, kind, index = action
        x, out = self.held.pop((stage, index))
        grad = None if stage == self.schedule.n_stages - 1 else self.local.pop(("I", stage + 1, index))
        store = self.pipeline.model.weight_gradients
        before_backward(
            self.pipeline.model.stages[stage], self.pipeline.zero_stage, last=self._is_last(action)
        )
        with nullcontext() if kind == "B" or store is None else store.putting_off((stage, index)):
            torch.autograd.backward(out, grad)
        if stage > 0:
            assert x.grad is not None
            self.input_gradient = x.grad

    def _hand_over_gradient(self, action: Action) -> None:
        """Of the backward that was the last."""
        gradient, self.input_gradient = self.input_gradient, None
        if gradient is not None:
            self._hand_over(("I", action.stage, action.microbatch), gradient)

    def _weight_gradients(self, action: Action) -> None:
        store = self.pipeline.model.weight_gradients
        if store is not None:
            store.run((action.stage, action.microbatch))
        if self._is_last(action):
            reduce_gradients(self.pipeline.model.stages[action.stage])

    def _is_last(self, action: Action) -> bool:
        """Whether the stage has no gradients to make after this."""
        return self.last_of_stage[action.stage] == action

    def _hand_over(self, made: tuple[str, int, int], tensor: Tensor) -> None:
        kind, stage, _ = made
        consumer = stage + 1 if kind == "F" else stage - 1
        if self.schedule.rank_of_stage[consumer] == self.rank:
            self.local[made] = tensor
        else:
            self.messages.send(made, tensor)


def _hidden_shape(pipeline: Pipeline, batch: StageInput) -> tuple[int, ...]:
    """(B, S / ranks that share a row, D) of the hidden states of a micro-batch between two stages."""
    rows, seq_len = batch.tokens.shape
    return rows, seq_len // pipeline.sequence_ranks, pipeline.model.args.dim
