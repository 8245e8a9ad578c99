"""Whole tensors from the parts that ranks hold, for comparing them by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of whole tensors, gathered from all ranks that hold parts of them (collective)."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def all_stages(
    mine: dict[str, torch.Tensor], pipeline_group: dist.ProcessGroup, tied: bool
) -> dict[str, torch.Tensor]:
    """The tensors of all pipeline ranks (collective). Two copies of a tied matrix must be equal and become one."""
    if pipeline_group.size() == 1:
        return mine
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(pipeline_group.size())]
    dist.all_gather_object(parts, mine, group=pipeline_group)
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names)), "a parameter is on two stages"
    found = {name: tensor for part in parts for name, tensor in part.items()}
    if tied:
        output = found.pop("output.weight")
        assert torch.equal(output, found["tok_embeddings.weight"]), "the two copies of a tied matrix differ"
    return found
