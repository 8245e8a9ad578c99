"""The last collectives of this rank: which, on which axis, with what, called from where, and which are not over.

    call      group     seq   op           shape      start   end    called at
    ...       dp_shard  #41   all_gather   (4096,)    12.31   12.33  data.py:88 gather
    newest    tp        #97   all_reduce   (8, 512)   12.34   waits  tensor.py:51 forward

Collectives of one group have the same sequence numbers on all its ranks as long as the ranks agree, so two rings side
by side show who is behind and who called something else. Messages between two ranks are counted for each pair and
direction. The ring is always on: a call costs a few microseconds (tests/launch/test_flight_recorder.py measures it).

Seen is every call through a method of ProcessGroup, also inside custom operators. Functional collectives are not: for
them there is torch's own record (torch_trace.py).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor

import titan5d.metrics
from titan5d.launch.last_call import SCALAR, LastCall
from titan5d.launch.record import CallRecord, GroupRecord
from titan5d.metrics.axis_names import AxisNames
from titan5d.metrics.interception import GROUP_METHODS, Interception, tensors_in

FRAMES = 3
"""Callers kept of each call, outside of torch."""
TENSORS = 4
"""Shapes kept of each call."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Ops with one rank at their centre."""
PASSED_OVER = (
    str(Path(torch.__file__).parent),
    *(
        str(module.__file__) for module in (contextlib, typing_extensions, warnings)
    ),  # decorators around torch's functions
    __file__,
    str(Path(titan5d.metrics.__file__).parent),
)
"""Beginnings of file names that are not shown as callers: torch, and those who watch it."""


class Call:
    """One call of one collective, or of one message. Times are those of time.monotonic."""

    __slots__ = ("__weakref__", "dtype", "end", "frames", "group", "op", "peer", "seq", "shapes", "start")

    def __init__(self, group: Group, seq: int, op: str, start: float) -> None:
        self.group, self.seq, self.op, self.start = group, seq, op, start
        self.end: float | None = None
        self.peer: int | None = None
        self.shapes: tuple[torch.Size, ...] = ()
        self.dtype: torch.dtype | None = None
        self.frames: tuple[tuple[CodeType, int], ...] = ()


class Group:
    """The counters of one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.name = group.group_name  # the same on all its ranks: they found each other under it
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.calls = 0
        self.messages: dict[tuple[str, int | None], int] = {}  # (op, peer) -> how many


class FlightRecorder:
    """Records while its `with` block runs.

    Args:
        size: calls that are kept.

    Attributes:
        waits: thread -> the call it waits for, and since when.
        last: a page for the last call, if there is one.
    """

    def __init__(self, size: int) -> None:
        self.ring: deque[Call] = deque(maxlen=size)
        self.waits: dict[int, tuple[Call, float]] = {}
        self.last: LastCall | None = None
        self._groups: dict[dist.ProcessGroup, Group] = {}
        # id of torch's handle -> the call, as long as the handle lives
        self._live: dict[int, tuple[Call, weakref.ref[Any]]] = {}
        self._outside: dict[CodeType, bool] = {}
        self._axes: AxisNames | None = None
        self._interception = Interception()
        self._time_of_day = time.time() - time.monotonic()

    def __enter__(self) -> FlightRecorder:
        for name, (op, payload) in GROUP_METHODS.items():
            self._interception.replace(dist.ProcessGroup, name, partial(self._recorded, op, payload))
        self._interception.replace(dist.Work, "wait", self._waiting)
        return self

    def __exit__(self, *error: object) -> None:
        self._interception.undo()
        self._groups.clear()

    def name_axes(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Gives groups the names of their axes, e.g. `Meshes.groups()`; until then they go by their ranks."""
        self._axes = AxisNames(groups)

    def _recorded(self, op: str, payload: int | None, original: Any) -> Callable[..., Any]:
        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            call = self._begin(op, payload, group, (*args, *kwargs.values()))
            work = original(group, *args, **kwargs)
            if work is not None:
                key = id(work)
                self._live[key] = call, weakref.ref(work, lambda _: self._gone(key, call))
            return work

        return method

    def _begin(self, op: str, payload: int | None, group: dist.ProcessGroup, given: tuple[Any, ...]) -> Call:
        counters = self._groups.get(group)
        if counters is None:
            counters = self._groups[group] = Group(group)
        peer: int | None = None
        if op in ("send", "recv"):
            peer = given[1] if isinstance(given[1], int) else None
            line = op, peer
            seq = counters.messages[line] = counters.messages.get(line, 0) + 1
        else:
            seq = counters.calls = counters.calls + 1
            if op in ROOTED:
                peer = getattr(given[-1], "rootRank", None)
        call = Call(counters, seq, op, time.monotonic())
        call.peer = peer
        if payload is not None:
            tensors = given[payload]
            if isinstance(tensors, list) and len(tensors) == 1:
                tensors = tensors[0]
            first = [tensors] if isinstance(tensors, Tensor) else list(islice(tensors_in(tensors), TENSORS))
            call.shapes = tuple(tensor.shape for tensor in first)
            call.dtype = first[0].dtype if first else None
        call.frames = self._callers(sys._getframe(2))
        self.ring.append(call)
        if self.last is not None:
            at = None if peer is None else counters.ranks[peer]
            shapes = " ".join(",".join(map(str, shape)) or SCALAR for shape in call.shapes)
            dtype = str(call.dtype)[6:] if call.dtype is not None else ""  # without "torch."
            self.last.write(counters.name, seq, op, at, shapes, dtype, call.start + self._time_of_day)
        return call

    def _callers(self, frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
        """The innermost callers outside of torch; the line is worked out only when it is asked for."""
        found: list[tuple[CodeType, int]] = []
        outside = self._outside
        while frame is not None and len(found) < FRAMES:
            code = frame.f_code
            kept = outside.get(code)
            if kept is None:
                kept = outside[code] = not code.co_filename.startswith(PASSED_OVER)
            if kept:
                found.append((code, frame.f_lasti))
            frame = frame.f_back
        return tuple(found)

    def _gone(self, key: int, call: Call) -> None:
        """Torch's handle has died: waited for, or dropped."""
        self._live.pop(key, None)
        if call.end is None:
            call.end = time.monotonic()

    def _waiting(self, original: Any) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            # several calls coalesced into one have a handle of their own, made right after the last of them
            live = self._live.get(id(work))
            if live is None and not self.ring:
                return original(work, *args, **kwargs)
            call = self.ring[-1] if live is None else live[0]
            thread = threading.get_ident()
            self.waits[thread] = call, time.monotonic()
            try:
                return original(work, *args, **kwargs)
            finally:
                del self.waits[thread]
                call.end = time.monotonic()

        return wait

    # -- reading, from any thread ----------------------------------------------------------------------------------

    def axis(self, group: Group) -> str:
        """The axis of a group, or its ranks."""
        return (
            "ranks " + ",".join(map(str, group.ranks)) if self._axes is None else self._axes.of(group.group)
        )

    def axis_of_name(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(axis, ranks) of a group that the recorder has not met."""
        resolve: Callable[[str], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # type: ignore[assignment]
        group = Group(resolve(name))
        return self.axis(group), group.ranks

    def groups(self) -> list[GroupRecord]:
        """What this rank called on each group so far; the newest calls are in `calls`."""
        return [
            GroupRecord(
                name=group.name,
                axis=self.axis(group),
                ranks=group.ranks,
                calls=group.calls,
                messages=[
                    (op, group.ranks[peer] if peer is not None else -1, count)
                    for (op, peer), count in group.messages.items()
                ],
            )
            for group in list(self._groups.values())
        ]

    def calls(self, newest: int | None = None) -> list[CallRecord]:
        """The calls in the ring, or its newest and those that are waited for, oldest first."""
        kept = list(self.ring)
        if newest is not None:
            waited = [call for call, _ in list(self.waits.values())]
            kept = [call for call in kept[:-newest] if any(call is one for one in waited)] + kept[-newest:]
        return [self.record(call) for call in kept]

    def record(self, call: Call) -> CallRecord:
        """A call in plain values, with the times of day."""
        offset = self._time_of_day
        waited = any(call is one for one, _ in list(self.waits.values()))
        state = "waits" if waited else "done" if call.end is not None else self._state(call)
        return CallRecord(
            group=call.group.name,
            seq=call.seq,
            op=call.op,
            peer=None if call.peer is None else call.group.ranks[call.peer],
            shapes=[list(shape) for shape in call.shapes],
            dtype=str(call.dtype).removeprefix("torch.") if call.dtype is not None else "",
            start=call.start + offset,
            end=None if call.end is None else call.end + offset,
            state=state,
            at=[place(code, instruction) for code, instruction in call.frames],
        )

    def _state(self, call: Call) -> str:
        """Of a call that nobody waits for yet."""
        for one, handle in list(self._live.values()):
            work = handle() if one is call else None
            if work is not None:
                return "done" if work.is_completed() else "under way"
        return "under way"


def place(code: CodeType, instruction: int) -> str:
    """file:line function."""
    line = next(
        (line for start, end, line in code.co_lines() if start <= instruction < end), code.co_firstlineno
    )
    return f"{code.co_filename}:{line} {code.co_name}"
