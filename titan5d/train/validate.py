"""Loss on held-out data: the same batches every round, a global token mean, nothing of the training state touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
import torch.distributed as dist

from titan5d.data.dataset import MicroBatch
from titan5d.models.decoder import Decoder
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline_schedule import Pipeline, split_rows, stage_input
from titan5d.train.step import forward


@torch.no_grad()
def validation_loss(
    model: Decoder,
    batches: Iterable[MicroBatch],
    meshes: Meshes,
    device: torch.device,
    pipeline: Pipeline | None = None,
) -> float:
    """Sum of token losses / valid targets over `batches` of all ranks (every rank passes equally many).

    With several pipeline ranks `pipeline` runs the model. Returns nan when there is no valid target at all.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, valid targets
    for some in _passes(batches, pipeline):
        if pipeline is None:
            loss_sum, _ = forward(model, some[0], device)
        else:
            loss_sum = pipeline.evaluate([stage_input(batch, device) for batch in some])
        totals[0] += loss_sum
        # rows are whole on every context rank, so each counts its share
        totals[1] += sum(batch.valid_tokens for batch in some) / meshes.topology.cp
    dist.all_reduce(totals, group=meshes.group("loss"))
    model.train(was_training)
    return float(totals[0] / totals[1])


def _passes(batches: Iterable[MicroBatch], pipeline: Pipeline | None) -> Iterator[list[MicroBatch]]:
    """What goes through the model together: one micro-batch, or enough of them to fill the pipeline."""
    if pipeline is None:
        yield from ([batch] for batch in batches)
        return
    pieces = split_rows(batches, pipeline.plan.microbatch_size)
    while some := list(islice(pieces, pipeline.schedule.microbatches)):
        yield some
