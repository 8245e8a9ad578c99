"""Capacity: an expert takes at most so many choices of each row; those over it are dropped.

    capacity = ceil(factor * choices of the row / experts)         factor 1.0: exactly the even share

    expert 0 of a row, capacity 3:  t0 t1 t4 | t7 t9        the earlier tokens stay

A dropped choice adds nothing: the token goes on through the residual, its other experts and the shared ones. Its
weights stay as they were before the drop. Rows are counted one by one, as groups are in GShard (arXiv:2006.16668, 3.2),
so what is dropped does not depend on how rows are spread over ranks and micro-batches; and by order, never by score,
so no token is dropped because of one that comes after it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def drop_over_capacity(experts: Tensor, n_experts: int, factor: float) -> Tensor:
    """The choices (B, S, k), with n_experts (nowhere) in place of those over the capacity of their expert.

    Choices that are n_experts already (padding) neither count nor take up room.
    """
    flat = experts.flatten(1)  # (B, S * k), in the order of tokens
    ordered, choice = torch.sort(flat, dim=1, stable=True)
    first = torch.searchsorted(ordered, ordered)  # where the run of equal experts begins
    rank = torch.arange(flat.shape[1], device=flat.device) - first
    capacity = torch.ceil((flat < n_experts).sum(1, keepdim=True).double() * factor / n_experts)  # (B, 1)
    kept = torch.where(rank < capacity, ordered, n_experts)
    return torch.empty_like(flat).scatter_(1, choice, kept).view_as(experts)
