"""The matrix products of a block, behind two calls that a cut may carry out in its own way.

    column  x -> several products of one input: q, k, v of attention; gate and up of the feed-forward
    row     the product that leads back into the residual stream: attention's output; down

They are named for how the matrices are divided when several devices share a product.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class Products:
    """On one device: each linear layer by itself."""

    def column(self, x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
        """x (B, S, in) -> (B, S, out of each layer); on a device that shares them, its columns of each output."""
        return [linear(x) for linear in linears]

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """x (B, S, in, or what this device holds of it) -> (B, S, out)."""
        return linear(x)
