"""Exposed communication: how long a step stood still for a collective, by mesh axis.

What a collective takes does not matter, only what of it nothing hides: the time spent in `wait`. On a CPU that is the
time in which the calling thread waits. On CUDA `wait` makes the current stream wait, not the host: events before and
after it lie as far apart as the stream stood still. FSDP2 waits for its own streams through their events, so these are
watched, too, and count for the axis whose collective went into that stream last.

Every collective through torch.distributed and FSDP2 is seen, from any thread and inside custom operators. Not seen are
functional collectives (torch.ops._c10d_functional), which here sum the gradients of norms over tensor ranks, and so on
through DTensor.redistribute: they are part of the phase they happen in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from titan5d.metrics.axis_names import AxisNames
from titan5d.metrics.interception import GROUP_METHODS, Interception
from titan5d.metrics.stopwatch import Stopwatch

PREFIX = "exposed/"
ALONE = "a group of one rank"
"""In place of an axis, for what waits for nobody."""


class ExposedCommunication:
    """Watches while its `with` block runs, and adds to a stopwatch under "exposed/" and the axis.

    Args:
        groups: as in AxisNames.
        streams: the class of the device's streams; None = torch.cuda.Stream on CUDA.
    """

    def __init__(
        self, groups: Mapping[str, dist.ProcessGroup], watch: Stopwatch, streams: type | None = None
    ) -> None:
        self.axes = AxisNames(groups)
        self.watch = watch
        self.streams = torch.cuda.Stream if streams is None and watch.on_cuda else streams
        self._started: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # work -> axis
        self._recorded: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # event -> axis
        self._last = "other"
        self._interception = Interception()

    def __enter__(self) -> ExposedCommunication:
        for name in GROUP_METHODS:
            self._interception.replace(dist.ProcessGroup, name, self._starting)
        self._interception.replace(dist.Work, "wait", self._waiting)
        if self.streams is not None:
            self._interception.replace(self.streams, "record_event", self._recording)
            self._interception.replace(self.streams, "wait_event", self._stream_waiting)
        return self

    def __exit__(self, *error: Any) -> None:
        self._interception.undo()

    def _starting(self, original: Any) -> Callable[..., Any]:
        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            axis = self._last = self.axes.of(group) if group.size() > 1 else ALONE
            work = original.__get__(group)(*args, **kwargs)
            if work is not None:
                self._started[work] = axis
            return work

        return method

    def _waiting(self, original: Any) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            begin = self.watch.mark()
            try:
                return original.__get__(work)(*args, **kwargs)
            finally:
                # several calls coalesced into one have a handle of their own, made right after the last of them
                axis = self._started.get(work, self._last)
                if axis != ALONE:
                    self.watch.add(PREFIX + axis, begin, self.watch.mark())

        return wait

    def _recording(self, original: Any) -> Callable[..., Any]:
        def record_event(stream: Any, *args: Any, **kwargs: Any) -> Any:
            event = original.__get__(stream)(*args, **kwargs)
            self._recorded[event] = self._last
            return event

        return record_event

    def _stream_waiting(self, original: Any) -> Callable[..., Any]:
        def wait_event(stream: Any, event: Any) -> Any:
            # only where the compute stream waits; side streams waiting for it hold up nothing
            axis = self._recorded.get(event)
            if axis in (None, ALONE) or stream != torch.cuda.current_stream():
                return original.__get__(stream)(event)
            begin = self.watch.mark()
            try:
                return original.__get__(stream)(event)
            finally:
                self.watch.add(f"{PREFIX}{axis}", begin, self.watch.mark())

        return wait_event
