"""Looks into this package's own operators: their bodies run operator by operator, seen by every ledger around.

    with MemoryLedger(model) as memory, CommunicationLedger(groups) as traffic, InsideOperators():
        train_step(...)

A custom operator (a gather with its products, ring attention) is one opaque step to torch: what it allocates and sends
in between is invisible to dispatch modes, and fake tensors know nothing of it but the shape of its result. Here the
body takes its place. The same numbers, the same memory; compiled blocks keep the operators as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACE = "titan5d"
KERNELS = ("titan5d::grouped_mm", "titan5d::grouped_mm_weight", "titan5d::reduce_scatter")
"""Left whole: they are one kernel or collective, of which only the results take memory."""
_DEVICE = torch.ops.prim.device.default


class InsideOperators(TorchDispatchMode):
    """Enter it last, so that it is asked first."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor comes back with its local tensors
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked several times at every operator; no ledger needs to hear of it
        kwargs = kwargs or {}
        if func.namespace != NAMESPACE or (name := func._schema.name) in KERNELS:
            return func(*args, **kwargs)
        body = torch._library.custom_ops.OPDEFS[name]._init_fn
        with self:  # bodies call other operators
            return body(*args, **kwargs)
