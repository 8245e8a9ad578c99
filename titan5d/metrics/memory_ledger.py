"""Memory ledger: what the bytes of live tensors are for, at every operator of a step.

    with MemoryLedger(model, optimizer) as ledger:
        train_step(...)
    ledger.peak         the moment with the most bytes, split by purpose
    ledger.highest      the most each purpose ever took, each at its own moment

It counts tensors, not what an allocator reserves for them, so it is exact, the same on every device, and needs no
counters of a device. It sees each storage when an operator first returns it, and forgets it when torch frees it. It
costs time at every operator: for tests and for looking closely, not for a run.

Purposes, by who holds a storage; views count once:

    weights      the parameters as they are between steps (their shards), and buffers
    gradients    .grad of a parameter, whole or shard, and the buffers of its reduction
    optimizer    the optimizer's state
    gathered     whole copies of sharded parameters, and the buffers of their all-gather
    activations  everything else made inside: what backward keeps, and temporaries
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class MemoryUse:
    """Bytes by purpose."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations

    def largest(self, other: MemoryUse) -> MemoryUse:
        """The larger of both for each purpose."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return MemoryUse(*(max(pair) for pair in pairs))


class MemoryLedger(TorchDispatchMode):
    """Follows the storages of one rank inside its `with` block.

    Enter it between steps, when parameters are sharded and there are no gradients. Tensors made before are counted if
    the model or the optimizer holds them.

    Attributes:
        peak: at the operator with the highest total.
        highest: of each purpose, at its own highest operator.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.peak, self.highest = MemoryUse(), MemoryUse()
        self._storages: dict[int, _Storage] = {}  # by address; dead ones remove themselves
        self._parameters = list(model.parameters())
        # While a unit is gathered its modules hold whole parameters instead
        self._registered = [module._parameters for module in model.modules() if module._parameters]
        self._states_marked = 0
        for tensor in (*self._parameters, *model.buffers()):
            self._mark(tensor, "weights")
        self._mark_held()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled blocks stay compiled; their operators are seen when they run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes back with its local tensors
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for purpose, value in self._purposes(str(func), args, kwargs, out):
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    self._mark(tensor, purpose)
        use = self.now()
        if use.total > self.peak.total:
            self.peak = use
        self.highest = self.highest.largest(use)
        return out

    def now(self) -> MemoryUse:
        """What is live at this moment."""
        self._mark_held()
        sums = dict.fromkeys(_PURPOSES, 0)
        for storage in tuple(self._storages.values()):
            if (alive := storage.reference()) is not None:
                sums[storage.purpose] += alive.nbytes()
        return MemoryUse(**sums)

    def _purposes(self, name: str, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[str, Any]]:
        if name.startswith(_GATHERS):
            yield "gathered", (out, kwargs)
        elif name.startswith(_REDUCTIONS):
            yield "gradients", (args, kwargs, out)
        elif name.startswith("aten._to_copy") and self._purpose(args[0]) == "gradients":
            yield "gradients", out  # FSDP2 accumulates gradients in the reduce type
        else:
            yield "activations", out

    def _mark_held(self) -> None:
        """Marks what has become a parameter, a gradient or optimizer state since the last look."""
        for parameters in self._registered:
            for parameter in parameters.values():
                if parameter is not None:
                    self._mark(parameter, "gathered")  # unless it is one of the weights
                    if parameter.grad is not None:
                        self._mark(parameter.grad, "gradients")
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._mark(parameter.grad, "gradients")
        if self.optimizer is not None and len(self.optimizer.state) != self._states_marked:
            self._states_marked = len(self.optimizer.state)
            for tensor in tree_leaves(list(self.optimizer.state.values())):
                if isinstance(tensor, Tensor):
                    self._mark(tensor, "optimizer")

    def _mark(self, tensor: Tensor, purpose: str) -> None:
        storage = _local(tensor).untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            address = storage._cdata
            reference = weakref.ref(storage, lambda _: self._storages.pop(address, None))
            self._storages[address] = _Storage(reference, purpose)
        elif known.purpose != "weights" and purpose != "activations":
            known.purpose = purpose

    def _purpose(self, tensor: Tensor) -> str | None:
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return None if known is None else known.purpose


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    purpose: str


_PURPOSES = tuple(field.name for field in fields(MemoryUse))
_GATHERS = ("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy", "c10d._allgather_base_")
_REDUCTIONS = ("fsdp.chunk_cat", "c10d._reduce_scatter_base_")


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
