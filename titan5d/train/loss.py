"""The loss: sum of token losses / ONE count of valid targets of the whole optimizer step (contract 2).

    loss = sum over all tokens of the global batch of l(token)  /  number of valid targets in the global batch

The count is summed over every rank that holds different rows, before the first backward, so each micro-batch on each
rank divides by the same number and gradients only ever have to be added. No other place divides: not FSDP, not
accumulation, not the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan5d.data.dataset import MicroBatch
from titan5d.metrics.flops import Work
from titan5d.metrics.throughput import work_of_rows

IGNORE = -100
"""Label of a position without target."""


@dataclass(frozen=True)
class StepCounts:
    """What the global batch of one optimizer step holds; equal on all ranks.

    Attributes:
        valid_targets: positions whose target counts: the loss's one denominator.
        work: tokens and squared document lengths, for FLOPs.
        padding: of these tokens, places that hold none (document id -1).
        rows: sequences.
        micro_batches: forward passes whose rows differ.
    """

    valid_targets: int
    work: Work
    padding: int
    rows: int
    micro_batches: int


def count_step(
    micro_batches: Iterable[MicroBatch], batch_group: dist.ProcessGroup, device: torch.device
) -> StepCounts:
    """Counts over all micro-batches of all data-parallel ranks, in one all-reduce.

    Rows are counted whole, before any cut of the sequence, so only ranks that read different rows are summed.
    """
    valid, work, padding, all_rows, passes = 0, Work(0, 0), 0, 0, 0
    for batch in micro_batches:
        valid += batch.valid_tokens
        rows, seq_len = batch.tokens.shape
        work += work_of_rows(rows, seq_len, batch.document_ids)
        padding += 0 if batch.document_ids is None else int((batch.document_ids < 0).sum())
        all_rows += rows
        passes += 1
    mine = [valid, work.tokens, work.squares, padding, all_rows, passes]
    counts = torch.tensor(mine, dtype=torch.int64, device=device)
    dist.all_reduce(counts, group=batch_group)
    valid, tokens, squares, padding, all_rows, passes = counts.tolist()
    return StepCounts(valid, Work(tokens, squares), padding, all_rows, passes)


def normalized(loss_sum: torch.Tensor, valid_targets: int) -> torch.Tensor:
    """This micro-batch's share of the step's loss: what backward runs on."""
    return loss_sum / valid_targets


def step_loss(
    loss_sum: torch.Tensor,
    row_sums: torch.Tensor,
    row_valid: torch.Tensor,
    valid_targets: int,
    loss_group: dist.ProcessGroup,
    context_group: dist.ProcessGroup,
) -> tuple[float, float]:
    """(loss of the step, highest mean loss of any single row): the same numbers on all ranks, whatever the layout.

    Args:
        loss_sum: fp32 scalar, this rank's sum of token losses over its micro-batches.
        row_sums: (rows,) fp32, the same by row; a context rank holds its slice of each row.
        row_valid: (rows,) valid targets of each whole row.
        valid_targets: of the whole step.
        loss_group: all ranks that hold different tokens.
        context_group: ranks that hold slices of the same rows.
    """
    total = loss_sum.detach().float().clone()
    dist.all_reduce(total, group=loss_group)
    rows = row_sums.detach().float().clone()
    if context_group.size() > 1:
        dist.all_reduce(rows, group=context_group)
    means = rows / row_valid.to(rows.device).clamp(min=1)
    worst = torch.where(row_valid.to(rows.device) > 0, means, torch.full_like(means, float("-inf"))).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=loss_group)
    return float(total) / valid_targets, float(worst)
