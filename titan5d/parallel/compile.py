"""torch.compile, block by block: one graph serves all blocks, whatever the depth.

A whole-model graph would break at every FSDP hook; a block is the largest piece between two of them.
"""

from __future__ import annotations

from titan5d.models.decoder import Decoder


def apply_compile(model: Decoder, components: list[str], backend: str) -> None:
    """Compiles every block in place (names stay), and the loss when asked."""
    if "model" in components:
        for block in model.layers.values():
            block.compile(backend=backend, fullgraph=True)
