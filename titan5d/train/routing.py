"""What an optimizer step tells the routers of a model with experts, and what it learns from them.

    before the first forward    how many tokens, rows and micro-batches the step has: what their losses divide by
    after the update            one all-reduce of the choices of all layers; each selection bias moves once

Choices are whole numbers from end to end: in bf16 a sum of thousands would be wrong, and a bias move the wrong way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from titan5d.models.decoder import Decoder
from titan5d.models.router import AUX_LOSS, ENTROPY, Z_LOSS
from titan5d.train.loss import StepCounts

BIAS_RANGE = 3
"""Place behind those of the router's own sums."""


def begin_step(model: Decoder, counts: StepCounts) -> None:
    """Tells every router what the global batch holds. Nothing to do in a model without experts."""
    for router in model.routers().values():
        router.begin_step(counts.work.tokens - counts.padding, counts.rows, counts.micro_batches)


@dataclass(frozen=True)
class Routing:
    """What the routers did in a step, over all ranks and equal on them; empty in a model without experts.

    Attributes:
        metrics: by layer `max_load` (of the fullest expert, 1 = its even share), `min_load`, `entropy` of the scores
            (nats), `dropped` choices, `bias_range` (largest less smallest selection bias, as the step used them).
            `moe/aux_loss` and `moe/z_loss` are summed over the layers.
        load: by layer with experts the load of each, 1 = its even share.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    load: list[list[float]] = field(default_factory=list)


@torch.no_grad()
def end_step(model: Decoder, groups: Sequence[dist.ProcessGroup], updated: bool) -> Routing:
    """Sums over all ranks what the routers counted, moves their biases and starts counting anew.

    Args:
        groups: process groups that together join all ranks which saw different tokens or hold different layers; the
            first joins ranks that hold the same layers.
        updated: whether the optimizer stepped; if not, biases stay, too.
    """
    args, routers = model.args, model.routers()
    if not args.n_experts:
        return Routing()
    device = next(model.parameters()).device
    # one row a layer, whoever holds it
    counts = torch.zeros(args.n_layers, args.n_experts + 1, dtype=torch.int64, device=device)
    sums = torch.zeros(args.n_layers, 4, dtype=torch.float32, device=device)
    for name, router in routers.items():
        counts[int(name)], sums[int(name), :BIAS_RANGE] = router.step_counts, router.step_sums
        if groups[0].rank() == 0:  # equal on all ranks that hold the layer, so one of them tells it
            sums[int(name), BIAS_RANGE] = router.bias.max() - router.bias.min()
    for group in groups:
        dist.all_reduce(counts, group=group)
        dist.all_reduce(sums, group=group)
    for name, router in routers.items():
        router.end_step(counts[int(name), :-1], updated)
    return _routing(counts.cpu(), sums.cpu(), args.top_k)


def _routing(counts: torch.Tensor, sums: torch.Tensor, top_k: int) -> Routing:
    loads: list[list[float]] = []
    values = {"moe/aux_loss": float(sums[:, AUX_LOSS].sum()), "moe/z_loss": float(sums[:, Z_LOSS].sum())}
    for layer, (*load, dropped) in enumerate(counts.tolist()):
        choices = sum(load)
        if not choices:  # a dense layer
            continue
        even = choices / len(load)
        loads.append([expert / even for expert in load])
        values |= {
            f"moe/layer_{layer}/max_load": max(load) / even,
            f"moe/layer_{layer}/min_load": min(load) / even,
            f"moe/layer_{layer}/entropy": float(sums[layer, ENTROPY]) * top_k / choices,
            f"moe/layer_{layer}/dropped": dropped,
            f"moe/layer_{layer}/bias_range": float(sums[layer, BIAS_RANGE]),
        }
    return Routing(values, loads)
