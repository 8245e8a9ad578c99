"""Watches over torchrun and its ranks: passes on signals, bounds the wait for other nodes, returns the ranks' status.

    signal                    before there are ranks          with ranks
    SIGTERM, SIGHUP, SIGUSR1  torchrun; killed 5 s later      every rank: it saves in its own time and leaves
    Ctrl-C                    the same                        the same
    Ctrl-C again              torchrun; killed 5 s later      torchrun, which kills ranks that take over 30 s
    this process is killed    torchrun gets SIGTERM (Linux)   torchrun gets SIGTERM (Linux)

torchrun ends for good when node 0, which hosts the meeting, is gone; it is started again here while restarts are left,
and waits for node 0 to come back.

torchrun itself would answer the first signal with 30 seconds, which is short for a large checkpoint, and a traceback.
"""

from __future__ import annotations

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
from titan5d.launch.failure import ALONE, first_failure
from titan5d.launch.parent_death import signal_at_parents_death

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
GRACE_WITHOUT_RANKS = 5.0
"""Seconds for a launcher that has no ranks yet to end: one that waits for other nodes answers no signal."""
GRACE_AFTER_RANKS = 60.0
"""The same for one whose ranks have ended, while those of other nodes may still be leaving."""
GRACE_AFTER_REFUSAL = 30.0
"""Seconds for one whose ranks were refused: all nodes mostly are, and leave together."""
WITH_RANKS = 2.0
"""Seconds between two looks at whether ranks that failed have been started again."""
BETWEEN_LAUNCHES = 2.0
"""Seconds before a launcher that had lost node 0 is started again."""
FIRST_NOTE, NEXT_NOTE = 20.0, 60.0
"""Seconds after which, and between which, a node says that it waits for others."""


def supervise(
    command: Callable[[int], Sequence[str]],
    environ: Mapping[str, str],
    ranks: int,
    waiting: Callable[[], str] | None = None,
    join_timeout: float = 300.0,
    node: str = ALONE,
    restarts: int = 0,
    meets: Callable[[], bool] | None = None,
) -> int:
    """Runs the launcher until it has ended and returns the exit status of its `ranks`.

    Args:
        command: number of restarts that are left -> the launcher's.
        waiting: on one of several nodes, what to say while the others have not come.
        join_timeout: seconds after which the wait for them is given up.
        node: what to call this node in the sentence about its first failure.
        restarts: how often ranks may be started again.
        meets: on a node that can join again, whether the meeting on node 0 answers.
    """
    with tempfile.TemporaryDirectory(prefix="titan5d-status-") as folder:

        def report(processes: set[int]) -> bool:
            failed = first_failure(Path(folder), node, processes)
            if failed:
                print(f"titan5d: {failed}", file=sys.stderr, flush=True)
            return failed is not None

        def refused() -> bool:
            return exit_status.REFUSED in exit_status.recorded(Path(folder))

        left = restarts
        with _Launcher({**environ, exit_status.FOLDER: folder}, report, refused) as launcher:
            while True:
                code = launcher.run(command(left), waiting, join_timeout)
                status = exit_status.combine(Path(folder), ranks, code)
                if status == exit_status.FAILED:
                    report(launcher.ranks)
                left -= launcher.failures + (launcher.starts > 0)  # the last start has failed, too
                if status != exit_status.FAILED or meets is None or launcher.given_up or left < 0:
                    return status
                if launcher.starts == 0 and meets():  # it had a meeting, and failed all the same
                    return status
                if launcher.starts > 0:
                    why = "has lost the meeting on node 0" if code >= 0 else f"has lost torchrun (signal {-code})"
                    again = f"{node} {why} and joins again; restarts left: {left}"
                    print(f"titan5d: {again}", file=sys.stderr, flush=True)
                    launcher.ranks = set()  # they have been reported
                time.sleep(BETWEEN_LAUNCHES)


class _Launcher:
    """The processes of torchrun, one after another, with the signals of this one passed on to it or to its ranks.

    Attributes:
        ranks: the process ids of their last start. `report` gets those of a start that is over, if another follows,
            and says whether it failed; ranks are also started again when a node has joined.
        starts, failures: how often the launcher of the last `run` has started ranks, and how many of these starts,
            without the last one, have failed.
        given_up: nothing is to be started any more: a signal asked for the end, or other nodes did not come.
    """

    def __init__(
        self, environ: Mapping[str, str], report: Callable[[set[int]], bool], refused: Callable[[], bool]
    ) -> None:
        self.environ, self.report, self.refused = environ, report, refused
        self.ranks: set[int] = set()
        self.starts = self.failures = 0
        self.asked_to_stop_at: float | None = None
        self.interrupts = 0
        self.timed_out = False
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Launcher:
        self.handlers = {stop: signal.signal(stop, self._pass_on) for stop in STOPS}
        self._without_ranks_from_now()
        return self

    def __exit__(self, *exc: object) -> None:
        for stop, handler in self.handlers.items():
            signal.signal(stop, handler)

    @property
    def given_up(self) -> bool:
        return self.timed_out or self.asked_to_stop_at is not None

    def run(self, command: Sequence[str], waiting: Callable[[], str] | None, join_timeout: float) -> int:
        """Until the launcher has ended. Without ranks it waits for other nodes: at the start and after a failure."""
        self.starts = self.failures = 0
        # No signal may come between the start of the launcher and the moment it can be passed on
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            if self.asked_to_stop_at is not None:
                return exit_status.FAILED
            self.process = subprocess.Popen(
                command, env=self.environ, start_new_session=True, preexec_fn=_before_launcher
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        grace = GRACE_WITHOUT_RANKS
        while sys.platform == "linux":
            code = self._until_there_are_ranks(self.process, waiting, join_timeout, grace)
            if self.starts > 1 and self.asked_to_stop_at is not None:
                self.process.terminate()  # ranks that failed while they stopped need not start again
            grace = GRACE_AFTER_RANKS
            while code is None and self._ranks_live(self.process):
                code = self._ended(self.process, WITH_RANKS)
                self._without_ranks_from_now()
            if code is not None:
                self._wait_for_ranks()
                return code
        return self.process.wait()

    def _wait_for_ranks(self) -> None:
        """Ranks whose launcher was killed are just being killed as well (parent_death.py)."""
        deadline = time.monotonic() + GRACE_WITHOUT_RANKS
        folder = f"{exit_status.FOLDER}={self.environ[exit_status.FOLDER]}".encode()
        while time.monotonic() < deadline and any(_has(pid, folder) for pid in self.ranks):
            time.sleep(0.05)

    def _without_ranks_from_now(self) -> None:
        self.alone_since = time.monotonic()
        self.note_at = self.alone_since + FIRST_NOTE

    def _until_there_are_ranks(
        self,
        process: subprocess.Popen[bytes],
        waiting: Callable[[], str] | None,
        join_timeout: float,
        grace: float,
    ) -> int | None:
        """The exit status of a launcher that ended without (further) ranks, else None."""
        while not self._ranks_live(process):
            code, now = self._ended(process, 0.2), time.monotonic()
            refused, asked = self.refused(), self.asked_to_stop_at
            if waiting and not refused and not self.given_up and now > self.alone_since + join_timeout:
                print(f"titan5d: {waiting()}: given up after {join_timeout:g} s", file=sys.stderr, flush=True)
                self.timed_out = True
            if code is not None:
                return code
            if (
                self.timed_out
                or (asked is not None and now > max(self.alone_since, asked) + grace)
                or (refused and now > self.alone_since + GRACE_AFTER_REFUSAL)
            ):
                process.kill()
            elif waiting and not refused and now > self.note_at:
                print(f"titan5d: {waiting()}", file=sys.stderr, flush=True)
                self.note_at = now + NEXT_NOTE
        return None

    def _ranks_live(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether there are ranks; takes note of them."""
        ranks = set(rank_processes(process.pid))
        if ranks and not ranks & self.ranks:
            self.failures += self.report(self.ranks)
            self.ranks = set()
            self.starts += 1
        self.ranks |= ranks
        return bool(ranks)

    def _ended(self, process: subprocess.Popen[bytes], within: float) -> int | None:
        """The launcher's exit status, if it ends `within` so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=within)
        return None

    def _pass_on(self, number: int, frame: object) -> None:
        self.asked_to_stop_at = self.asked_to_stop_at or time.monotonic()
        self.interrupts += number == signal.SIGINT
        if self.process is None or self.process.poll() is not None:
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


def _has(pid: int, variable: bytes) -> bool:
    """Whether a process lives and has this variable in its environment."""
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _before_launcher() -> None:
    """Runs in the launcher before it becomes torchrun."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    signal_at_parents_death(signal.SIGTERM)
