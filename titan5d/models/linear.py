"""Linear layers that compute in the type of their input, whatever type their weights are stored in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """x (..., in) @ weight (out, in)^T + bias, in the type of x.

    Weights that are stored wider are rounded to it for each product, and their gradients are widened and summed in the
    stored type: mixed precision on one device.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)
