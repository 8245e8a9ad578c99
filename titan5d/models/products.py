"""The matrix products of a block, behind calls that a cut may carry out in its own way.

    column  x -> several products of one input: q, k, v of attention; gate and up of the feed-forward
    row     the product that leads back into the residual stream: attention's output; down

They are named for how the matrices are divided when several devices share a product. A third call marks what is
computed outside of them and read by all heads:

    shared  latent attention's rotated key
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

    def shared(self, x: Tensor) -> Tensor:
        """x (B, S, N), made from the same stream as the input of `column` -> beside its outputs, the same."""
        return x
