"""Loss on held-out data: the same batches every round, a global token mean, nothing of the training state touched."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from titan5d.data.dataset import MicroBatch
from titan5d.models.decoder import Decoder
from titan5d.parallel.mesh import Meshes
from titan5d.train.step import forward


@torch.no_grad()
def validation_loss(
    model: Decoder, batches: Iterable[MicroBatch], meshes: Meshes, device: torch.device
) -> float:
    """Sum of token losses / valid targets over `batches` of all ranks (every rank passes equally many).

    Returns nan when there is no valid target at all.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, valid targets
    for batch in batches:
        loss_sum, _ = forward(model, batch, device)
        totals[0] += loss_sum
        # rows are whole on every context rank, so each counts its share
        totals[1] += batch.valid_tokens / meshes.topology.cp
    dist.all_reduce(totals, group=meshes.group("loss"))
    model.train(was_training)
    return float(totals[0] / totals[1])
