"""What the real code runs on in a dry run: a world of which one rank exists, and tensors that have sizes only.

    process group   torch's "fake" backend: a collective returns at once, and what it should have received is unset
    tensors         parameters, and all that is computed from them, are fake; what is computed from real tensors alone
                    stays real, so that what the host has to know of the data (counts, documents) is known
    host reads      a number that the host reads off a fake tensor (loss, norm, loads for the log) is 1
    own operators   run by their bodies (metrics/inside_operators.py), so that nothing in them is missed

The device is called cpu, since without CUDA no tensor can be on a GPU; report.py says what that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from titan5d.metrics.interception import Interception
from titan5d.parallel.block_plan import forget_plans

DEVICE = torch.device("cpu")


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """This process is rank `rank` of a world whose other ranks do not exist.

    Raises RuntimeError when the process belongs to a real world already.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run makes its own process group, and this process has one already")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    changed = Interception()
    # A fake work is never done, and whoever sent a message would keep it to the end of the step
    changed.replace(dist.Work, "is_completed", _always_completed)
    # To learn shapes DTensor runs operators on fake tensors of whole parameters, which no rank has
    changed.replace(ShardingPropagator, "_propagate_tensor_meta_non_cached", _unseen)
    _forget()
    try:
        yield
    finally:
        _forget()
        changed.undo()
        dist.destroy_process_group()


def _always_completed(original: Any) -> Callable[[Any], bool]:
    return lambda work: True


def _unseen(original: Any) -> Callable[..., Any]:
    def propagate(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return propagate


def _forget() -> None:
    """Empties what is remembered from one world to the next: plans, and DTensor's decisions, which name groups."""
    forget_plans()
    _clear_sharding_prop_cache()


class FakeDevice:
    """Tensors without memory.

    with device.building():     a model on the meta device gets its "memory"
    with device.running():      a step runs
    """

    def __init__(self) -> None:
        self._tensors = FakeTensorMode(allow_non_fake_inputs=True)
        self._placement = _RealStaysReal(self._tensors)

    def building(self) -> FakeTensorMode:
        """Everything that is made is fake."""
        return self._tensors

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is made from fake tensors, or from nothing, is fake; what is made from real tensors is real."""
        with self._placement, _HostReads():
            yield

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside `running`: what is made from nothing is real, too, as the host counts its data."""
        self._placement.new_is_real = True
        try:
            yield
        finally:
            self._placement.new_is_real = False


class _RealStaysReal(TorchDispatchMode):
    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.new_is_real = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # DTensor comes back with its local tensors
        if FakeTensor not in types:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            is_real = not any(isinstance(tensor, FakeTensor) for tensor in given)
            if is_real and (given or self.new_is_real):
                return func(*args, **kwargs)
        with self.fake:
            return func(*args, **kwargs)


_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__bool__,
    torch.Tensor.__index__,
}


class _HostReads(TorchFunctionMode):
    """Answers 1 to whoever reads a number off a fake tensor, and a list of ones in its shape to `tolist`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and isinstance(args[0], FakeTensor):
            kind = bool if args[0].dtype == torch.bool else float if args[0].is_floating_point() else int
            return _ones(tuple(args[0].shape), kind)
        return func(*args, **(kwargs or {}))


def _ones(shape: tuple[int, ...], kind: type) -> Any:
    return [_ones(shape[1:], kind) for _ in range(shape[0])] if shape else kind(1)
