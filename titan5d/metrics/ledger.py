"""Communication ledger: which collectives ran, along which mesh axis, and how many bytes they moved.

    with CommunicationLedger(meshes.groups()) as ledger:
        train_step(...)
    ledger.total(axis="shard", op="all_gather").bytes
    print(ledger.table())

Bytes are what one rank has to send if the collective runs as a ring over its n ranks (for an uneven payload or a
broadcast: the mean over the ranks), whatever the backend really does (gloo's own reduce-scatter, for one, all-reduces).

    op                                   tensor counted             bytes sent by a rank
    all_gather                           output, all n pieces       (n - 1) / n
    reduce_scatter                       input, all n pieces        (n - 1) / n
    all_reduce                           the tensor                 2 (n - 1) / n      (= the two above)
    broadcast, reduce                    the tensor                 (n - 1) / n
    gather, scatter                      one rank's piece           (n - 1) / n
    all_to_all                           input                      all but the piece that stays
    send                                 the tensor                 all
    recv                                 the tensor                 none (its sender counts them)
    barrier                              none                       none

Collectives have two ways into torch, and both are watched, on all threads that run inside the context, in forward,
backward and recompute:

    torch.distributed.*         ends in a method of ProcessGroup, also from inside a custom op (ring attention), where
                                no dispatch mode looks; these methods are wrapped while the context is open
    torch.ops._c10d_functional  (DTensor, compiled graphs, tensor parallelism) never touches these methods: a
                                dispatch mode sees the operators

The one thing not seen is a functional collective inside a custom op. The operator titan5d::reduce_scatter counts as
what it is, the messages it is made of do not. Groups of one rank move nothing and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan5d.metrics.axis_names import AxisNames
from titan5d.metrics.interception import GROUP_METHODS, Interception, tensors_in


@dataclass(frozen=True)
class Traffic:
    """How often, and how much, on one rank.

    Attributes:
        count: calls; several tensors in one coalesced call are one.
        bytes: sent by this rank, in the ring's closed form.
        tensor_bytes: of the tensors counted (see the module's text).
    """

    count: int = 0
    bytes: float = 0.0
    tensor_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.count + other.count, self.bytes + other.bytes, self.tensor_bytes + other.tensor_bytes
        )

    def __rmul__(self, times: int) -> Traffic:
        return Traffic(times * self.count, times * self.bytes, times * self.tensor_bytes)


@dataclass(frozen=True)
class Entry:
    """All calls of one kind: `axis` and `op` as in the module's text, `dtype` as in "float32"."""

    axis: str
    op: str
    dtype: str
    traffic: Traffic


class CommunicationLedger:
    """Records while its `with` block runs. One ledger may be entered again and then adds up.

    Args:
        groups: axis name -> this rank's group along it, e.g. `Meshes.groups()`; see AxisNames.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._axes = AxisNames(groups)
        self._records: dict[tuple[str, str, str], Traffic] = {}
        self._interception = Interception()
        self._mode = _FunctionalCollectives(self)
        self.counts_messages = True

    def __enter__(self) -> CommunicationLedger:
        for name, (op, payload) in GROUP_METHODS.items():
            self._interception.replace(dist.ProcessGroup, name, partial(_recorded, self, op, payload))
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._interception.undo()

    @property
    def entries(self) -> list[Entry]:
        """By axis, op and type, sorted."""
        return [Entry(*key, traffic) for key, traffic in sorted(self._records.items())]

    def total(self, axis: str | None = None, op: str | None = None, dtype: str | None = None) -> Traffic:
        """The sum of all entries that match; None matches all."""
        matching = (
            entry.traffic
            for entry in self.entries
            if axis in (None, entry.axis) and op in (None, entry.op) and dtype in (None, entry.dtype)
        )
        return sum(matching, Traffic())

    def table(self) -> str:
        """One line an entry, for people."""
        lines = [f"{'axis':12} {'op':14} {'type':10} {'count':>6} {'bytes sent':>14} {'tensor bytes':>14}"]
        for entry in self.entries:
            traffic = entry.traffic
            lines.append(
                f"{entry.axis:12} {entry.op:14} {entry.dtype:10} {traffic.count:6}"
                f" {traffic.bytes:14,.0f} {traffic.tensor_bytes:14,}"
            )
        return "\n".join(lines)

    def record(self, op: str, payload: list[Tensor], group: dist.ProcessGroup, staying: int = 0) -> None:
        """Adds one call. `staying`: bytes of the payload that do not leave this rank (all_to_all)."""
        if group.size() == 1:
            return
        tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in payload)
        sent = (tensor_bytes - staying) * _SHARE_SENT[op](group.size())
        dtype = str(payload[0].dtype).removeprefix("torch.") if payload else "-"
        key = self._axes.of(group), op, dtype
        self._records[key] = self._records.get(key, Traffic()) + Traffic(1, sent, tensor_bytes)


_SHARE_SENT: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: 1.0,
    "send": lambda n: 1.0,
    "recv": lambda n: 0.0,
    "barrier": lambda n: 0.0,
}


def _recorded(ledger: CommunicationLedger, op: str, payload: int | None, original: Any) -> Callable[..., Any]:
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if op in ("send", "recv") and not ledger.counts_messages:
            return original(group, *args, **kwargs)
        given = [*args, *kwargs.values()]
        tensors = [] if payload is None else list(tensors_in(given[payload]))
        staying = 0
        if op == "all_to_all":
            # all_to_all_single has (output, input, output splits, input splits), alltoall (outputs, inputs)
            splits = given[3] if len(given) > 3 and isinstance(given[3], list | tuple) else []
            staying = _staying(tensors, splits, group)
        ledger.record(op, tensors, group, staying)
        return original(group, *args, **kwargs)

    return method


class _FunctionalCollectives(TorchDispatchMode):
    """Reports every operator of `torch.ops._c10d_functional` that starts a collective."""

    def __init__(self, ledger: CommunicationLedger) -> None:
        super().__init__()
        self.ledger = ledger

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled blocks stay compiled, and their operators are seen when they run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # let DTensor turn it into local operators and collectives, which come back here
        kwargs = kwargs or {}
        if func.namespace == "_c10d_functional":
            names = (argument.name for argument in func._schema.arguments)
            given = dict(zip(names, args, strict=False)) | kwargs
            self._record(func._schema.name.removeprefix("_c10d_functional::"), given)
        if func._schema.name == "titan5d::reduce_scatter":
            _, whole, group_name = args
            group = dist.distributed_c10d._resolve_process_group(group_name)
            self.ledger.record("reduce_scatter", [whole], group)
            self.ledger.counts_messages = False
            try:
                return func(*args, **kwargs)
            finally:
                self.ledger.counts_messages = True
        return func(*args, **kwargs)

    def _record(self, name: str, given: dict[str, Any]) -> None:
        if "group_name" not in given:
            return  # wait_tensor
        group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        if name == "batch_p2p_ops":
            for op, tensor in zip(given["op_list"], given["tensors"], strict=True):
                self.ledger.record(op.removeprefix("i"), [tensor], group)
            return
        op = next(op for prefix, op in _FUNCTIONAL.items() if name.startswith(prefix))
        tensors = list(tensors_in(next(iter(given.values()))))
        staying = 0
        if op == "all_gather":
            tensors *= group.size()  # the first argument is one rank's piece
        elif op == "all_to_all":
            staying = _staying(tensors, given["input_split_sizes"], group)
        self.ledger.record(op, tensors, group, staying)


_FUNCTIONAL = {
    # beginnings of operator names, with and without _coalesced, _out and the final _ of in-place forms
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send",
    "irecv": "recv",
}


def _staying(inputs: list[Tensor], splits: Any, group: dist.ProcessGroup) -> int:
    """Bytes of an all-to-all's input that go to the sending rank itself.

    Args:
        inputs: one tensor cut along its first dimension, or a tensor for each rank.
        splits: rows for each rank; empty = equal parts.
    """
    if len(inputs) > 1:
        own = inputs[group.rank()]
        return own.numel() * own.element_size()
    whole = inputs[0].numel() * inputs[0].element_size()
    if not splits:
        return whole // group.size()
    rows = sum(int(split) for split in splits)
    return whole // rows * int(splits[group.rank()]) if rows else 0
