"""Being asked to stop: SIGTERM, SIGINT, SIGUSR1 or SIGHUP end the run after the current step, a second one at once.

    signal to any rank -> a flag on that rank -> agreed by all ranks at the end of the step -> saved, exit status 3

Signals are counted on a thread, so that a second one works also while this rank hangs inside a collective, where no
Python handler would run.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from titan5d.launch import exit_status

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME = 1.0
"""Seconds in which several signals count as one: a launcher passes on what its ranks got directly as well."""


class StopSignals:
    """While entered, the stop signals set `asked` to their number instead of ending this process. Main thread only."""

    def __init__(self) -> None:
        self.asked = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._thread = threading.Thread(target=self._count, name="titan5d signals", daemon=True)
        self._thread.start()
        # Without a Python handler the signal would not be reported, but end the process
        self._handlers = {stop: signal.signal(stop, _nothing) for stop in STOPS}
        self._old_write = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._old_write)
        for stop, handler in self._handlers.items():
            # When a rank fails torchrun sends SIGTERM to the others, whose own errors are then on their way out and
            # must arrive in the records first
            if stop != signal.SIGTERM or error is None:
                signal.signal(stop, handler)
        self._write.close()
        self._thread.join()
        self._read.close()

    def _count(self) -> None:
        first = 0.0
        while received := self._read.recv(64):
            for number in received:
                if number not in STOPS:
                    continue
                now = time.monotonic()
                if not self.asked:
                    first, self.asked = now, number
                elif now - first > SAME:
                    print(f"titan5d: {signal_name(number)} again: ended at once", file=sys.stderr, flush=True)
                    exit_status.leave_at_once(128 + number)


def _nothing(number: int, frame: FrameType | None) -> None:
    """The thread has it."""


def signal_name(number: int) -> str:
    return signal.Signals(number).name
