"""Watches over torchrun and its ranks: passes on signals, bounds the wait for other nodes, returns the ranks' status.

    signal                    before there are ranks          with ranks
    SIGTERM, SIGHUP, SIGUSR1  torchrun; killed 5 s later      every rank: it saves in its own time and leaves
    Ctrl-C                    the same                        the same
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan5d.launch import exit_status
from titan5d.launch.failure import first_failure

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
GRACE_WITHOUT_RANKS = 5.0
"""Seconds for a launcher that has no ranks yet to end: one that waits for other nodes answers no signal."""
GRACE_AFTER_RANKS = 60.0
"""The same for one whose ranks have ended, while those of other nodes may still be leaving."""
WITH_RANKS = 2.0
"""Seconds between two looks at whether ranks that failed have been started again."""
FIRST_NOTE, NEXT_NOTE = 20.0, 60.0
"""Seconds after which, and between which, a node says that it waits for others."""


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    ranks: int,
    waiting: Callable[[], str] | None = None,
    join_timeout: float = 300.0,
    node: str = "this node",
) -> int:
    """Runs the launcher `command` until it has ended and returns the exit status of its `ranks`.

    Args:
        waiting: on one of several nodes, what to say while the others have not come.
        join_timeout: seconds after which the wait for them is given up.
        node: what to call this node in the sentence about its first failure.
    """
    with tempfile.TemporaryDirectory(prefix="titan5d-status-") as folder:

        def report(processes: set[int]) -> None:
            failed = first_failure(Path(folder), node, processes)
            if failed:
                print(f"titan5d: {failed}", file=sys.stderr, flush=True)

        launcher = _Launcher(command, {**environ, exit_status.FOLDER: folder}, report)
        code = launcher.wait(waiting, join_timeout)
        status = exit_status.combine(Path(folder), ranks, code)
        if status == exit_status.FAILED:
            report(launcher.ranks)
        return status


class _Launcher:
    """The process of torchrun, with the signals of this one passed on to it or to its ranks while `wait` runs.

    Attributes:
        ranks: the process ids of their last start. `report` gets those of a start that is over, if another follows.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], report: Callable[[set[int]], None]
    ) -> None:
        self.ranks: set[int] = set()
        self.report = report
        self.asked_to_stop_at: float | None = None
        self.interrupts = 0
        # No signal may come between the start of the launcher and the moment it can be passed on
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        self.handlers = {stop: signal.signal(stop, self._pass_on) for stop in STOPS}
        try:
            self.process = subprocess.Popen(command, env=environ, start_new_session=True, preexec_fn=_before_launcher)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def wait(self, waiting: Callable[[], str] | None, join_timeout: float) -> int:
        """Until the launcher has ended. Without ranks it waits for other nodes: at the start and after a failure."""
        grace = GRACE_WITHOUT_RANKS
        try:
            while sys.platform == "linux":
                code = self._until_there_are_ranks(waiting, join_timeout, grace)
                if grace == GRACE_AFTER_RANKS and self.asked_to_stop_at is not None:
                    self.process.terminate()  # ranks that failed while they stopped need not start again
                grace = GRACE_AFTER_RANKS
                while code is None and self._ranks_live():
                    code = self._ended(WITH_RANKS)
                if code is not None:
                    return code
            return self.process.wait()
        finally:
            for stop, handler in self.handlers.items():
                signal.signal(stop, handler)

    def _until_there_are_ranks(
        self, waiting: Callable[[], str] | None, join_timeout: float, grace: float
    ) -> int | None:
        """The exit status of a launcher that ended without (further) ranks, else None."""
        started = time.monotonic()
        note_at = started + FIRST_NOTE
        while not self._ranks_live():
            code = self._ended(0.2)
            if code is not None:
                return code
            now = time.monotonic()
            if self.asked_to_stop_at is not None and now > max(started, self.asked_to_stop_at) + grace:
                self.process.kill()
            elif waiting and now > started + join_timeout:
                print(f"titan5d: {waiting()}: given up after {join_timeout:g} s", file=sys.stderr, flush=True)
                self.process.kill()
            elif waiting and now > note_at:
                print(f"titan5d: {waiting()}", file=sys.stderr, flush=True)
                note_at = now + NEXT_NOTE
        return None

    def _ranks_live(self) -> bool:
        """Whether there are ranks; takes note of them."""
        ranks = set(rank_processes(self.process.pid))
        if ranks and not ranks & self.ranks:
            self.report(self.ranks)
            self.ranks = set()
        self.ranks |= ranks
        return bool(ranks)

    def _ended(self, within: float) -> int | None:
        """The launcher's exit status, if it ends `within` so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout=within)
        return None

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
