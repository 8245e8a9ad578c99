"""Fills every rank's shards from (seed, parameter name, element index), without building the rest (contract 4)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan5d.models.decoder import Decoder
from titan5d.models.init import fill_slice, init_specs


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Fills all parameters, plain or DTensor, in place (they must have real memory)."""
    specs = init_specs(model.args)
    done: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters():
        if parameter in done:  # a tied tensor has two names; the first fills it
            continue
        done.add(parameter)
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            local = parameter.to_local()
        else:
            shape, offset = tuple(parameter.shape), (0,) * parameter.dim()
            local = parameter.data
        if local.numel():
            local.copy_(
                fill_slice(
                    seed, name, tuple(parameter.shape), offset, shape, specs[name], device=local.device
                )
            )
