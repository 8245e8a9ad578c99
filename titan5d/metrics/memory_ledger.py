"""Memory ledger: what the bytes of live tensors are for, at every operator of a step.

    with MemoryLedger(model, optimizer) as ledger:
        train_step(...)
    ledger.peak         the moment with the most bytes, split by purpose
    ledger.highest      the most each purpose ever took, each at its own moment

It counts tensors, not what an allocator reserves for them, so it is exact, the same on every device, and needs no
counters of a device: fake tensors, which have sizes and no memory, count as others do. It sees each storage when an
operator first returns it, and forgets it when torch frees it. It costs time at every operator: for tests, dry runs and
for looking closely, not for a run.

Purposes, by who holds a storage; views count once:

    weights      the parameters as they are between steps (their shards), and buffers
    gradients    .grad of a parameter, whole or shard
    optimizer    the optimizer's state
    gathered     whole copies of sharded parameters, and the buffers in which they arrive
    buffers      of FSDP2's reductions of gradients
    activations  everything else made inside: what backward keeps, and temporaries
    logits       the same, while `made` says so: of the head and the loss
    other        the same: of the update
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


@dataclass
class MemoryUse:
    """Bytes by purpose."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    buffers: int = 0
    activations: int = 0
    logits: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

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
        made: the purpose of whatever is made from now on and gets no other.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.peak, self.highest = MemoryUse(), MemoryUse()
        self.made: Literal["activations", "logits", "other"] = "activations"
        self._sums = dict.fromkeys(_PURPOSES, 0)
        self._peak = 0
        self._names: dict[Any, str] = {}
        self._operators = 0
        self._storages: dict[int, _Storage] = {}  # by address; dead ones remove themselves
        # Places where a parameter stands. While a unit is gathered its modules hold whole parameters instead
        modules = [module._parameters for module in model.modules() if module._parameters]
        self._places = [_Place(parameters, name, parameters[name]) for parameters in modules for name in parameters]
        self._parameters = list(model.parameters())
        self._shapes: set[torch.Size] = set()  # of whatever stood there
        self._hooks: list[RemovableHandle] = []
        self._states_marked = 0
        for tensor in (*self._parameters, *model.buffers()):
            self._mark(tensor, "weights")
        self._mark_held()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled blocks stay compiled; their operators are seen when they run

    def __enter__(self) -> MemoryLedger:
        # FSDP2 frees gathered parameters by resizing their storages, which no operator tells of
        resize = torch.UntypedStorage.resize_
        setattr(torch.UntypedStorage, "resize_", self._resizing(resize))  # noqa: B010 - the class has it from its base
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        delattr(torch.UntypedStorage, "resize_")  # the base's is seen again
        while self._hooks:
            self._hooks.pop().remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor comes back with its local tensors
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # nobody else need see the looking
            name = self._name(func)
            for purpose, value in self._purposes(name, args, kwargs, out):
                for tensor in [value] if isinstance(value, Tensor) else tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        self._mark(tensor, purpose)
            self._operators += 1
            self._mark_state()
            # A look at every parameter is dear. FSDP2 exchanges them around its own operators, and autograd tells of
            # each gradient; what nobody tells of (deferred weight gradients) waits a little
            if name.startswith("fsdp.") or self._operators % LOOK_EVERY == 0:
                self._mark_held()
        self._note()
        return out

    def _name(self, func: Any) -> str:
        if (name := self._names.get(func)) is None:
            name = self._names[func] = str(func)
        return name

    def now(self) -> MemoryUse:
        """What is live at this moment."""
        self._mark_held()
        return MemoryUse(**self._sums)

    def _note(self) -> None:
        """Keeps what is highest; of equal moments the last, as what is filled in later has its purpose only then."""
        sums, highest = self._sums, self.highest
        if (total := sum(sums.values())) >= self._peak:
            self._peak, self.peak = total, MemoryUse(**sums)
        for purpose, value in sums.items():
            if value > getattr(highest, purpose):
                setattr(highest, purpose, value)

    def _purposes(self, name: str, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[str, Any]]:
        if name.startswith(_GATHERS):
            yield "gathered", (out, kwargs)
        elif name.startswith(_COPY_GRADIENTS):
            yield "gradients", args
            yield "buffers", kwargs
        elif name.startswith(_REDUCE) and self._purpose(args[1]) == "buffers":  # tensor ranks reduce, too
            yield "buffers", args[0]
        elif name.startswith("aten._to_copy") and self._is_gradient(args[0]):
            yield "gradients", out  # FSDP2 accumulates gradients in the reduce type
        elif name.startswith("aten.cat") and args[0] and self._is_gradient(args[0][0]):
            yield "gradients", out  # of copies, side by side to be summed
        else:
            yield self.made, out

    def _is_gradient(self, tensor: Tensor) -> bool:
        if self._purpose(tensor) in _MADE and tensor.shape in self._shapes:  # it may be one that nobody told of
            self._mark_held()
        return self._purpose(tensor) in ("gradients", "buffers")

    def _mark_held(self) -> None:
        """Marks what has become a parameter, a gradient or optimizer state since the last look."""
        for place in self._places:
            parameter = place.parameters[place.name]
            if parameter is None:
                continue
            if parameter is not place.last:
                place.last = parameter
                self._shapes.add(parameter.shape)
                self._mark(parameter, "gathered")  # unless it is one of the weights
                if parameter.requires_grad and parameter.is_leaf:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._mark_gradient))
            if parameter.grad is not None and parameter is not place.first:
                self._mark_gradient(parameter)
        for parameter in self._parameters:  # these are the places' first
            if parameter.grad is not None:
                self._mark_gradient(parameter)
        self._mark_state()

    def _mark_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._mark(parameter.grad, "gradients")

    def _mark_state(self) -> None:
        if self.optimizer is None or len(self.optimizer.state) == self._states_marked:
            return
        self._states_marked = len(self.optimizer.state)
        for tensor in tree_leaves(list(self.optimizer.state.values())):
            if isinstance(tensor, Tensor):
                self._mark(tensor, "optimizer")

    def _mark(self, tensor: Tensor, purpose: str) -> None:
        storage = _local(tensor).untyped_storage()
        address = storage._cdata
        known = self._storages.get(address)
        if known is None:
            reference = weakref.ref(storage, partial(self._forget, address))
            self._storages[address] = _Storage(reference, purpose, storage.nbytes())
            self._sums[purpose] += storage.nbytes()
        elif purpose != known.purpose and known.purpose != "weights" and purpose not in _MADE:
            self._sums[known.purpose] -= known.nbytes
            self._sums[purpose] += known.nbytes
            known.purpose = purpose

    def _forget(self, address: int, _: object) -> None:
        storage = self._storages.pop(address)
        self._sums[storage.purpose] -= storage.nbytes

    def _resizing(self, original: Any) -> Any:
        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = original(storage, nbytes)
            if known := self._storages.get(storage._cdata):
                self._sums[known.purpose] += storage.nbytes() - known.nbytes
                known.nbytes = storage.nbytes()
            return result

        return resize_

    def _purpose(self, tensor: Tensor) -> str | None:
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return None if known is None else known.purpose


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    purpose: str
    nbytes: int


@dataclass
class _Place:
    """Where a module keeps a parameter, what stood there at first, and at the last look."""

    parameters: dict[str, Any]
    name: str
    first: Tensor | None
    last: Tensor | None = None


LOOK_EVERY = 64
"""Operators."""
_PURPOSES = tuple(field.name for field in fields(MemoryUse))
_MADE = ("activations", "logits", "other")
_GATHERS = ("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy")
_COPY_GRADIENTS = "fsdp.chunk_cat"
_REDUCE = ("c10d._reduce_scatter_base_", "titan5d.reduce_scatter")


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
