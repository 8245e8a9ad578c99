"""torch.compile, block by block: one graph serves all blocks, whatever the depth.

A whole-model graph would break at every FSDP hook; a block is the largest piece between two of them. A block whose
experts are cut has such a hook and two exchanges inside, whose sizes are known only when it runs: its attention, router
and shared experts are compiled one by one, and the routed experts, two products and a SwiGLU, are not.

Of the loss, what happens to a chunk of logits is compiled: softmax, loss and gradient, a dozen passes over the largest
tensor there is. The products around it are one kernel each anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from titan5d.models.cross_entropy import ChunkedCrossEntropy, token_losses
from titan5d.models.decoder import Decoder
from titan5d.models.moe import MoE


def apply_compile(model: Decoder, components: list[str], backend: str, experts_are_cut: bool = False) -> None:
    """Compiles every block in place (names stay), and the loss when asked."""
    if "model" in components:
        for block in model.layers.values():
            for part in _parts(block) if experts_are_cut else [block]:
                part.compile(backend=backend, fullgraph=True)
    loss = None if model.output is None else model.output.cross_entropy
    if "loss" in components and isinstance(loss, ChunkedCrossEntropy):
        loss.losses_of = torch.compile(loss.losses_of or token_losses, backend=backend, fullgraph=True)


def _parts(block: nn.Module) -> Iterator[nn.Module]:
    moe = block.feed_forward
    if not isinstance(moe, MoE):
        yield block
        return
    for part in (block.attention, moe.router, moe.shared_experts):
        if isinstance(part, nn.Module):
            yield part
