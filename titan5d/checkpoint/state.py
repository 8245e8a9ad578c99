"""What a checkpoint holds of a rank: blocks of tensors under global names, whatever the cut.

    model.layers.3.attention.wq.weight                 parameters, and buffers that are saved (router biases)
    optimizer.exp_avg.layers.3.attention.wq.weight     the optimizer's state of that parameter
    generators.2.torch                                 random generators of rank 2

A block is the part of a tensor that this rank holds, with its offset in the whole. A tied head is the embedding: its
copy on a last pipeline stage is the same tensor under the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan5d.models.decoder import Decoder
from titan5d.parallel.local_part import placed
from titan5d.train.muon import Muon
from titan5d.train.narrow_state import widened

KEEP_TYPE = (".router.bias",)
"""Ends of names that no export converts: a selection bias moves in steps that bfloat16 does not have."""


@dataclass(frozen=True)
class Block:
    """This rank's part of one tensor; `local` is the live memory (of narrow optimizer state, a widened copy).

    Attributes:
        key: name in the checkpoint.
        shape: of the whole tensor.
        offset: where `local` begins in it.
        home: (key, offset) of the parameter's block that it belongs to; the rank that saves one saves the other.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: Tensor
    home: tuple[str, tuple[int, ...]]


def model_blocks(model: Decoder) -> list[Block]:
    """Parameters and saved buffers of the parts that are here. Two copies of a tied matrix have one key."""
    named = model.state_dict().items()
    blocks = [_block(f"model.{_canonical(model, name)}", tensor) for name, tensor in named]
    return [block for block in blocks if block.local.numel()]


def optimizer_blocks(model: Decoder, optimizer: torch.optim.Optimizer) -> list[Block]:
    """All state the optimizer has by now; none before its first step."""
    blocks = []
    for name, parameter in _named(optimizer):
        name = _canonical(model, name)
        for field, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                block = _block(f"optimizer.{field}.{name}", value)
                # A counter has no place of its own: it goes with the beginning of its parameter
                offset = block.offset if value.dim() else (0,) * parameter.dim()
                blocks.append(replace(block, home=(f"model.{name}", offset)))
    return [block for block in blocks if block.local.numel()]


def make_optimizer_state(
    model: Decoder, optimizer: torch.optim.Optimizer, fields: dict[str, dict[str, tuple[int, ...]]]
) -> None:
    """Gives every parameter the state a checkpoint has for it, to be filled.

    Args:
        fields: parameter name -> field -> shape of the whole.
    """
    for name, parameter in _named(optimizer):
        state = optimizer.state[parameter]
        state.clear()
        for field, shape in fields.get(_canonical(model, name), {}).items():
            if shape == tuple(parameter.shape):
                state[field] = _zeros_like(parameter)
            else:
                state[field] = torch.zeros(
                    shape, dtype=torch.float32, device=_counter_device(optimizer, parameter)
                )


def _zeros_like(parameter: Tensor) -> Tensor:
    """Plain zeros placed as the parameter, whose own shard may be wrapped."""
    if not isinstance(parameter, DTensor):
        return torch.zeros_like(parameter, requires_grad=False)
    local = parameter.to_local()
    return placed(torch.zeros(local.shape, dtype=parameter.dtype, device=local.device), parameter)


def _counter_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    """Fused updates count steps on the device, the others on the CPU (torch.optim's own rule)."""
    fused = optimizer.fused if isinstance(optimizer, Muon) else bool(optimizer.defaults.get("fused"))
    return parameter.device if fused else torch.device("cpu")


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def _canonical(model: Decoder, name: str) -> str:
    return "tok_embeddings.weight" if name == "output.weight" and model.args.tie_embeddings else name


def _block(key: str, tensor: Tensor) -> Block:
    tensor = tensor.detach()
    offset: tuple[int, ...] = (0,) * tensor.dim()
    local = tensor
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        # weights that are gathered in float8 are wrapped; the master inside is what trains
        local = getattr(local, "_tensor", local)
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Block(key, tuple(tensor.shape), tuple(offset), widened(local), (key, tuple(offset)))
