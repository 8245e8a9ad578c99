"""The output head: hidden states to logits, or, given labels, straight to the loss."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from titan5d.models.cross_entropy import ChunkedCrossEntropy
from titan5d.models.linear import Linear

CrossEntropy = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden (B, S, D), weight (V, D), labels (B, S)) -> (loss_sum (), row_sums (B,)), both fp32."""


class OutputHead(Linear):
    """A linear map dim -> vocab_size without bias, whose loss never holds all logits.

    Attributes:
        cross_entropy: how the loss is computed; may be replaced, e.g. when each device holds a slice of the vocabulary.
    """

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.cross_entropy: CrossEntropy = ChunkedCrossEntropy()

    def forward(  # type: ignore[override]
        self, hidden: Tensor, labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """hidden (B, S, D) -> logits (B, S, V); with labels (B, S): `(loss_sum, row_sums)` of `cross_entropy`."""
        if labels is None:
            return super().forward(hidden)
        return self.cross_entropy(hidden, self.weight.to(hidden.dtype), labels)
