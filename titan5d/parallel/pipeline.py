"""Cut 4, layers: each pipeline rank holds some of the stack, and micro-batches pass through the ranks.

    rank 0 (stage 0)   tok_embeddings, layers 0 1 2     x (B, S, D) ->          rank 0   F0 F1 F2 .  .  B0 B1 B2
    rank 1 (stage 1)   layers 3 4 5 6                             ->            rank 1   .  F0 F1 F2 B0 B1 B2 .
    rank 2 (stage 2)   layers 7 8, norm, output                      -> loss    rank 2   .  .  F0 B0 F1 B1 F2 B2

Axis sliced: layers. Nothing but hidden states and their gradients travels, T D elements a micro-batch and boundary
each way: tokens, positions, document ids and labels are read by every rank of a pipeline from the same rows.

A stage is a `Decoder` of which only some parts are there. Which ones is settled by config/pipeline_plan.py; in which
order stages work is a table (schedules/), run by pipeline_schedule.py. A rank may hold several stages:

    loop  stage s on rank s % p              V  rank r holds stages r and 2 p - 1 - r

Tied embedding and head on two stages are two copies of one tensor: they start equal (init goes by name), get the sum
of both gradients and are stepped alike; the norm counts one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.parallel.deferred_weights import WeightGradientStore
from titan5d.parallel.pipeline_messages import PipelineGroups
from titan5d.schedules.table import Schedule


def build_stage(args: ModelArgs, names: Iterable[str]) -> Decoder:
    """A decoder with only the named parts (best on the meta device, where the others cost nothing).

    Raises ValueError when the model has no such part.
    """
    wanted = set(names)
    model = Decoder(args)
    there = {"tok_embeddings", "norm", "output", *(f"layers.{name}" for name in model.layers)}
    if wanted - there:
        raise ValueError(f"the model has no {', '.join(sorted(wanted - there))}")
    for name in there - wanted:
        if name.startswith("layers."):
            del model.layers[name.removeprefix("layers.")]
        else:
            setattr(model, name, None)
    return model


class PipelineModel(Decoder):
    """The stages of one rank under the names of the whole model: what optimizer, norm and checkpoints see.

    The stages themselves are called one by one (`stages`), this module never.

    Args:
        stages: by their number. No two hold the same part.
        weight_gradients: where the stages leave weight gradients that wait; None = backward is never split.
    """

    def __init__(self, stages: Mapping[int, Decoder], weight_gradients: WeightGradientStore | None) -> None:
        nn.Module.__init__(self)
        models = [stages[number] for number in sorted(stages)]
        self.args = models[0].args
        self.tok_embeddings = next((m.tok_embeddings for m in models if m.tok_embeddings is not None), None)
        self.layers = nn.ModuleDict({name: block for m in models for name, block in m.layers.items()})
        self.norm = next((m.norm for m in models if m.norm is not None), None)
        self.output = next((m.output for m in models if m.output is not None), None)
        # A plain dict: as submodules the same parts would get a second name
        self.stages = {number: stages[number] for number in sorted(stages)}
        self.weight_gradients = weight_gradients

    def train(self, mode: bool = True) -> PipelineModel:
        super().train(mode)
        for stage in self.stages.values():
            stage.train(mode)
        return self

    def init_buffers(self, device: torch.device | str) -> None:
        for stage in self.stages.values():
            stage.init_buffers(device)

    def _tie(self) -> None:
        """Nothing: where both ends are on one rank (V), they are still two stages, each with its copy."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        raise TypeError("a pipeline rank holds parts of the model: Pipeline.step or evaluate runs them")

    def counted_parameters(self) -> list[nn.Parameter]:
        """The parameters that the gradient norm counts here: all but the head's copy of a tied embedding."""
        tied_head = self.output.weight if self.args.tie_embeddings and self.output is not None else None
        return [parameter for parameter in self.parameters() if parameter is not tied_head]


@torch.no_grad()
def sum_tied_gradients(model: PipelineModel, schedule: Schedule, groups: PipelineGroups) -> None:
    """Gives both copies of a tied embedding the sum of their gradients: one exchange between first and last stage.

    Both sides add the same two numbers, so the copies stay bitwise equal.
    """
    if not model.args.tie_embeddings:
        return
    grads = [
        end.weight.grad.to_local() if isinstance(end.weight.grad, DTensor) else end.weight.grad
        for end in (model.tok_embeddings, model.output)
        if end is not None and end.weight.grad is not None
    ]
    first, last = schedule.rank_of_stage[0], schedule.rank_of_stage[-1]
    if first == last:
        if groups.rank == first:
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
        return
    if groups.rank in (first, last):
        (mine,) = grads
        peer = last if groups.rank == first else first
        theirs = torch.empty_like(mine)
        works = [
            dist.irecv(theirs, group=groups.between(peer, groups.rank), group_src=peer),
            dist.isend(mine.contiguous(), group=groups.between(groups.rank, peer), group_dst=peer),
        ]
        for work in works:
            assert work is not None
            work.wait()
        mine.add_(theirs)
