"""Whole parameters: where several ranks hold copies, the gradients of a step are summed while backward runs.

    backward     layer 3 | layer 2 | layer 1 | layer 0 | finish
    all-reduces            [== 3 ==][== 2 ==][== 1 ==][== 0 ==]

The parameters of a unit (a block, say) are summed together: as soon as backward has made the last of their gradients,
these are laid side by side, and the all-reduce of that buffer starts. From then on the gradients are views of it, so
nothing is copied back. Units leave in one fixed order on all ranks, whatever the order in which gradients are made.

Between micro-batches nothing is sent: gradients add up on each rank, and the last backward of a step sends them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan5d.parallel.local_part import local_part, placed


@dataclass
class Unit:
    """Parameters whose gradients are summed together.

    Attributes:
        modules: whose parameters they are; read when the model has its memory.
        mesh: the ranks that hold copies, one-dimensional.
        without: parameters of these modules that are not summed here, by module.
    """

    modules: Sequence[nn.Module]
    mesh: DeviceMesh
    without: Collection[nn.Module] = ()
    parameters: list[nn.Parameter] = field(default_factory=list)
    awaited: int = 0
    flight: tuple[Any, Tensor] | None = None

    def collect(self, done: set[nn.Parameter]) -> None:
        """Finds the parameters that are not in `done`, and adds them there."""
        left_out = {parameter for module in self.without for parameter in module.parameters()}
        for module in self.modules:
            for parameter in module.parameters():
                if parameter.requires_grad and parameter not in left_out and parameter not in done:
                    done.add(parameter)
                    self.parameters.append(parameter)


class ReplicaSum:
    """The sum over copies (models/decoder.py, GradientSum) of the gradients of `units`, in the order of forward.

    Args:
        dtype: type in which gradients are summed.
    """

    def __init__(self, units: Sequence[Unit], dtype: torch.dtype) -> None:
        self.units, self.dtype = list(reversed(units)), dtype
        self._is_ready = False
        self._is_last = False
        self._next = 0  # units before this one have left

    def begin_backward(self, last: bool) -> None:
        """To be called before each backward. last: of the step."""
        self._make_ready()
        self._is_last = last
        for unit in self.units:
            unit.awaited = len(unit.parameters)

    def finish(self) -> None:
        """After the last backward of a step: returns when all gradients are summed."""
        self._make_ready()
        for unit in self.units:
            unit.awaited = 0
        self._send()
        for unit in self.units:
            _land(unit)
        self._is_last, self._next = False, 0

    def copies(self) -> Iterator[tuple[nn.Parameter, DeviceMesh]]:
        """Every parameter with the ranks that hold copies of it."""
        self._make_ready()
        return ((parameter, unit.mesh) for unit in self.units for parameter in unit.parameters)

    def _make_ready(self) -> None:
        """The parameters of a model are other ones once it has memory, so they are looked up at the first use."""
        if self._is_ready:
            return
        self._is_ready = True
        done: set[nn.Parameter] = set()
        for unit in reversed(self.units):
            unit.collect(done)
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._made, unit))
        self.units = [unit for unit in self.units if unit.parameters]

    def _made(self, unit: Unit, parameter: Tensor) -> None:
        if self._is_last:
            unit.awaited -= 1
            self._send()

    def _send(self) -> None:
        """Sends the units whose gradients are all there, up to the first that still waits."""
        while self._next < len(self.units) and self.units[self._next].awaited <= 0:
            unit = self.units[self._next]
            buffer = _side_by_side(unit, self.dtype)
            unit.flight = dist.all_reduce(buffer, group=unit.mesh.get_group(), async_op=True), buffer
            self._next += 1


@torch.no_grad()
def _side_by_side(unit: Unit, dtype: torch.dtype) -> Tensor:
    """All gradients of a unit in one vector of `dtype`; if that is theirs, they become views of it."""
    for parameter in unit.parameters:
        if parameter.grad is None:  # it had no part in the loss here, but may have elsewhere
            parameter.grad = torch.zeros_like(parameter)
    locals_ = [local_part(parameter.grad) for parameter in unit.parameters]
    if len(locals_) == 1 and locals_[0].dtype == dtype and locals_[0].is_contiguous():
        return locals_[0].view(-1)
    buffer = torch.cat([grad.reshape(-1).to(dtype) for grad in locals_])
    if dtype == locals_[0].dtype:
        _place(unit, buffer)
    return buffer


def _land(unit: Unit) -> None:
    assert unit.flight is not None
    (work, buffer), unit.flight = unit.flight, None
    work.wait()
    stored = unit.parameters[0].dtype
    if buffer.dtype != stored:
        _place(unit, buffer.to(stored))


def _place(unit: Unit, buffer: Tensor) -> None:
    """Makes the gradients views of `buffer`, which has their type."""
    sizes = [local_part(parameter.grad).numel() for parameter in unit.parameters]
    for parameter, piece in zip(unit.parameters, buffer.split(sizes), strict=True):
        grad = parameter.grad
        piece = piece.view(local_part(grad).shape)
        parameter.grad = placed(piece, grad) if isinstance(grad, DTensor) else piece
