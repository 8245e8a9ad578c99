"""Watches over torchrun and its ranks: passes on signals, bounds the wait for other nodes, returns the ranks' status.

    signal                    before there are ranks          with ranks
    SIGTERM, SIGHUP, Ctrl-C   torchrun; killed 5 s later      every rank: it saves in its own time and leaves
    Ctrl-C again              torchrun; killed 5 s later      torchrun, which kills ranks that take over 30 s
    this process is killed    torchrun gets SIGTERM (Linux)   torchrun gets SIGTERM (Linux)

torchrun itself would answer the first signal with 30 seconds, which is short for a large checkpoint, and a traceback.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan5d.launch import exit_status

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_WITHOUT_RANKS = 5.0
"""Seconds for a launcher that has no ranks to end: one that waits for other nodes answers no signal."""
FIRST_NOTE, NEXT_NOTE = 20.0, 60.0
"""Seconds after which, and between which, a node says that it waits for others."""


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    ranks: int,
    waiting: str | None = None,
    join_timeout: float = 300.0,
) -> int:
    """Runs the launcher `command` until it has ended and returns the exit status of its `ranks`.

    Args:
        waiting: on one of several nodes, what to say while the others have not come.
        join_timeout: seconds after which the wait for them is given up.
    """
    with tempfile.TemporaryDirectory(prefix="titan5d-status-") as folder:
        launcher = _Launcher(command, {**environ, exit_status.FOLDER: folder})
        code = launcher.wait(waiting, join_timeout)
        return exit_status.combine(Path(folder), ranks, code)


class _Launcher:
    """The process of torchrun, with the signals of this one passed on to it or to its ranks while `wait` runs."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.asked_to_stop_at: float | None = None
        self.interrupts = 0
        # No signal may come between the start of the launcher and the moment it can be passed on
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        self.handlers = {stop: signal.signal(stop, self._pass_on) for stop in STOPS}
        try:
            self.process = subprocess.Popen(command, env=environ, start_new_session=True, preexec_fn=_before_launcher)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def wait(self, waiting: str | None, join_timeout: float) -> int:
        started = time.monotonic()
        note_at = started + FIRST_NOTE
        try:
            while sys.platform == "linux" and not rank_processes(self.process.pid):
                with suppress(subprocess.TimeoutExpired):
                    return self.process.wait(timeout=0.2)
                now = time.monotonic()
                if self.asked_to_stop_at is not None and now > self.asked_to_stop_at + GRACE_WITHOUT_RANKS:
                    self.process.kill()
                elif waiting and now > started + join_timeout:
                    print(f"titan5d: {waiting}: given up after {join_timeout:g} s", file=sys.stderr)
                    self.process.kill()
                elif waiting and now > note_at:
                    print(f"titan5d: {waiting}", file=sys.stderr)
                    note_at = now + NEXT_NOTE
            return self.process.wait()
        finally:
            for stop, handler in self.handlers.items():
                signal.signal(stop, handler)

    def _pass_on(self, number: int, frame: object) -> None:
        self.asked_to_stop_at = self.asked_to_stop_at or time.monotonic()
        self.interrupts += number == signal.SIGINT
        if self.process.poll() is not None:
            return
        receivers = rank_processes(self.process.pid) if self.interrupts < 2 else []
        for pid in receivers or [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def rank_processes(launcher: int) -> list[int]:
    """The ranks that the launcher with this process id has started; none where there is no /proc to read it from."""
    ranks = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            # "pid (name) state parent ...", and a name may hold spaces and brackets
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"\0LOCAL_RANK=" in b"\0" + stat.with_name("environ").read_bytes():
                ranks.append(int(stat.parent.name))
    return ranks


def _before_launcher() -> None:
    """Runs in the launcher before it becomes torchrun."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG: if this process's parent is killed outright, it is told
        ctypes.CDLL(None).prctl(death_signal, signal.SIGTERM)
