"""Cut 3, context: every row is cut over ranks, so no rank ever holds the whole sequence.

    row       | chunk 0 | chunk 1 | chunk 2 | chunk 3 |        2 x 2 chunks for 2 ranks, zig-zag (zigzag.py)
    rank 0    | chunk 0 |         |         | chunk 3 |        embedding, norms, feed-forward, loss: its tokens only
    rank 1    |         | chunk 1 | chunk 2 |         |        attention: its queries against the keys of all

Axis sliced: sequence. Tokens, labels and positions are made for the whole row and cut once, before the model; logits
and losses stay cut. Collectives, per layer: those of the attention method alone,

    ring       K and V travel round the ranks, T/c tokens a hop, while the block that is here is computed (ring.py)
    allgather  K and V of all ranks are gathered first (allgather_kv.py): simplest, holds them whole
    ulysses    all-to-all: sequence in, heads out, and back (ulysses.py): heads must divide

Weights are the same on all context ranks, so FSDP shards them over data and context ranks alike (mesh.py) and sums
their gradients; the loss counts every token once, wherever it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan5d.models.decoder import Decoder
from titan5d.parallel.allgather_kv import AllGatherAttention
from titan5d.parallel.block_plan import prepare_documents
from titan5d.parallel.ring import RingAttention
from titan5d.parallel.ulysses import UlyssesAttention
from titan5d.parallel.zigzag import LoadBalancer, SequenceCut

Method = Literal["ring", "allgather", "ulysses"]


@dataclass(frozen=True)
class ContextParallel:
    """How the context axis is executed.

    Attributes:
        method: how attention sees the whole row.
        load_balancer: which chunks a rank holds; headtail gives all ranks the same causal work.
    """

    method: Method = "ring"
    load_balancer: LoadBalancer = "headtail"


def apply_context_parallel(model: Decoder, group: ProcessGroup, plan: ContextParallel) -> None:
    """Cuts what goes into `model` and swaps the core of every attention (in place).

    The model is called as before, with whole rows; what it returns covers this rank's tokens. A pipeline stage gets
    hidden states that are cut already.
    """
    cut = SequenceCut(group.size(), plan.load_balancer)
    for block in model.layers.values():
        attention: Any = block.attention
        attention.core = _core(group, plan)
    model.prepare_mask = prepare_documents  # attention plans with the documents of the whole rows
    model.register_forward_pre_hook(_Cutter(cut, group.rank()), with_kwargs=True, prepend=True)


def _core(group: ProcessGroup, plan: ContextParallel) -> nn.Module:
    if plan.method == "ring":
        return RingAttention(group, plan.load_balancer)
    if plan.method == "allgather":
        return AllGatherAttention(group, plan.load_balancer)
    return UlyssesAttention(group, plan.load_balancer)


class _Cutter:
    """A forward hook on the decoder: (tokens, positions, document_ids, labels) of whole rows -> this rank's part."""

    def __init__(self, cut: SequenceCut, rank: int) -> None:
        self.cut, self.rank = cut, rank

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        inputs = dict(zip(("tokens", "positions", "document_ids", "labels"), args, strict=False)) | kwargs
        tokens, positions = inputs["tokens"], inputs.get("positions")
        hidden = tokens.is_floating_point()
        if positions is None:
            # counted over the whole row, before the cut: a rank's first token is not the row's
            seq_len = tokens.shape[1] * (self.cut.degree if hidden else 1)
            positions = torch.arange(seq_len, device=tokens.device).expand(tokens.shape[0], seq_len)
        inputs["positions"] = self._shard(positions)
        if not hidden:
            inputs["tokens"] = self._shard(tokens)
        if inputs.get("labels") is not None:
            inputs["labels"] = self._shard(inputs["labels"])
        return (), inputs

    def _shard(self, rows: Tensor) -> Tensor:
        return self.cut.shard(rows, self.rank)  # (B, S) -> (B, S / degree)
