"""What an optimizer step tells the routers of a model with experts, and what it learns from them.

    before the first forward    how many tokens, rows and micro-batches the step has: what their losses divide by
    after the update            one all-reduce of the choices of all layers; each selection bias moves once

Choices are whole numbers from end to end: in bf16 a sum of thousands would be wrong, and a bias move the wrong way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from titan5d.models.decoder import Decoder
from titan5d.models.router import AUX_LOSS, ENTROPY, Z_LOSS
from titan5d.train.loss import StepCounts


def begin_step(model: Decoder, counts: StepCounts) -> None:
    """Tells every router what the global batch holds. Nothing to do in a model without experts."""
    for router in model.routers().values():
        router.begin_step(counts.work.tokens - counts.padding, counts.rows, counts.micro_batches)


@torch.no_grad()
def end_step(model: Decoder, groups: Sequence[dist.ProcessGroup], updated: bool) -> dict[str, float]:
    """Sums over all ranks what the routers counted, moves their biases and starts counting anew.

    Args:
        groups: process groups that together join all ranks which saw different tokens or hold different layers.
        updated: whether the optimizer stepped; if not, biases stay, too.

    Returns:
        Metrics, equal on all ranks; none of a model without experts. By layer: `max_load` (of the fullest expert, 1 =
        its even share), `min_load`, `entropy` of the scores (nats), `dropped` choices.
        `moe/aux_loss` and `moe/z_loss` are summed over the layers.
    """
    args, routers = model.args, model.routers()
    if not args.n_experts:
        return {}
    device = next(model.parameters()).device
    # one row a layer, whoever holds it
    counts = torch.zeros(args.n_layers, args.n_experts + 1, dtype=torch.int64, device=device)
    sums = torch.zeros(args.n_layers, 3, dtype=torch.float32, device=device)
    for name, router in routers.items():
        counts[int(name)], sums[int(name)] = router.step_counts, router.step_sums
    for group in groups:
        dist.all_reduce(counts, group=group)
        dist.all_reduce(sums, group=group)
    for name, router in routers.items():
        router.end_step(counts[int(name), :-1], updated)
    return _metrics(counts.cpu(), sums.cpu(), args.top_k)


def _metrics(counts: torch.Tensor, sums: torch.Tensor, top_k: int) -> dict[str, float]:
    values = {"moe/aux_loss": float(sums[:, AUX_LOSS].sum()), "moe/z_loss": float(sums[:, Z_LOSS].sum())}
    for layer, (*load, dropped) in enumerate(counts.tolist()):
        choices = sum(load)
        if not choices:  # a dense layer
            continue
        even = choices / len(load)
        values |= {
            f"moe/layer_{layer}/max_load": max(load) / even,
            f"moe/layer_{layer}/min_load": min(load) / even,
            f"moe/layer_{layer}/entropy": float(sums[layer, ENTROPY]) * top_k / choices,
            f"moe/layer_{layer}/dropped": dropped,
        }
    return values
