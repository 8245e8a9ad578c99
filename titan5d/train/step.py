"""One optimizer step, readable on one screen: count, forward and backward of every micro-batch, norm, clip, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from titan5d.data.dataset import MicroBatch
from titan5d.metrics.phases import StepPhases
from titan5d.models.decoder import Decoder
from titan5d.parallel.audit import GradientAudit
from titan5d.parallel.data import before_microbatch
from titan5d.parallel.gradients import clip_by_norm, global_norm, reduce_partial_gradients
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline_schedule import Pipeline, split_rows, stage_input
from titan5d.train import routing
from titan5d.train.loss import IGNORE, StepCounts, count_step, normalized, step_loss


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on all ranks.

    Attributes:
        loss: sum of token losses / valid targets, over the global batch.
        max_loss: highest mean loss of any single row of the global batch.
        grad_norm: norm of the whole model's gradient before clipping.
        counts: valid targets, tokens and squared document lengths of the global batch.
        updated: False if the step was left out (no valid target, or a gradient that was not finite).
        routing: what the routers did, if there are experts.
    """

    loss: float
    max_loss: float
    grad_norm: float
    counts: StepCounts
    updated: bool
    routing: routing.Routing = field(default_factory=routing.Routing)


def train_step(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    meshes: Meshes,
    zero_stage: int,
    max_norm: float,
    device: torch.device,
    pipeline: Pipeline | None = None,
    phases: StepPhases | None = None,
    audit: GradientAudit | None = None,
) -> StepResult:
    """Trains on one global batch, of which `micro_batches` are this rank's part.

    Without any valid target in the whole batch nothing changes. With a gradient norm that is not finite the update is
    left out, so a bad batch never reaches the weights or the optimizer's moments. With several pipeline ranks, `model`
    is this rank's stages and `pipeline` runs them. `phases` is told what is going on. `audit`, if
    given, looks at the gradients before they are clipped.
    """
    phases = phases or StepPhases(device)
    if pipeline is not None:
        micro_batches = list(split_rows(micro_batches, pipeline.plan.microbatch_size))
    with phases("count"):
        counts = count_step(micro_batches, meshes.group("batch"), device)
    valid = counts.valid_targets
    if valid == 0:
        return StepResult(0.0, 0.0, 0.0, counts, updated=False)

    routing.begin_step(model, counts)
    parameters = counted = list(model.parameters())
    if pipeline is None:
        loss_sum, row_sums = accumulate(model, micro_batches, zero_stage, valid, device, phases)
    else:
        inputs = [stage_input(batch, device) for batch in micro_batches]
        loss_sum, row_sums = pipeline.step(inputs, partial(normalized, valid_targets=valid), phases)
        counted = pipeline.model.counted_parameters()

    with phases("optimizer"):
        reduce_partial_gradients(parameters)
        if audit is not None:
            audit.check()
        norm = global_norm(counted, pipeline_group=meshes.group("pp"))
        clip_by_norm(parameters, norm, max_norm)
        grad_norm = float(norm)
        if finite := math.isfinite(grad_norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with phases("loss"):
        load = routing.end_step(model, [meshes.group("stage"), meshes.group("pp")], updated=finite)
        row_valid = torch.cat([(batch.labels != IGNORE).sum(dim=1) for batch in micro_batches])
        groups = meshes.group("loss"), meshes.group("cp")
        loss, max_loss = step_loss(loss_sum, row_sums, row_valid, valid, *groups)
    return StepResult(loss, max_loss, grad_norm, counts, updated=finite, routing=load)


def accumulate(
    model: Decoder,
    micro_batches: Sequence[MicroBatch],
    zero_stage: int,
    valid: int,
    device: torch.device,
    phases: StepPhases,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward, one micro-batch after the other: (sum of token losses; by row, (rows,))."""
    loss_sum, row_sums = torch.zeros((), device=device), []
    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        before_microbatch(model, zero_stage, last)
        with phases("forward"):
            part, rows = forward(model, batch, device)
        with phases("backward"):
            normalized(part, valid).backward()
            if last:
                model.gradient_sum.finish()
        loss_sum += part.detach()
        row_sums.append(rows)
    return loss_sum, torch.cat(row_sums)


def forward(model: Decoder, batch: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of token losses, per-row sums) of one micro-batch."""
    return model(
        batch.tokens.to(device, non_blocking=True),
        _to(batch.positions, device),
        _to(batch.document_ids, device),
        batch.labels.to(device, non_blocking=True),
    )


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=True)
