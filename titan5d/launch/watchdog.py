"""The watchdog of a run of several ranks: when a collective takes too long, or a rank fails, it says why and ends all.

    every rank   a thread: sign of life, look at the flight recorder, look for the alarm of another rank
    too long, or an error, or an alarm -> this rank's record into the folder, then the alarm for the others
    the lowest rank with a record -> waits a moment for the rest, prints the verdict
    every rank   leaves with status 1

The main thread may meanwhile stand in a collective (gloo's wait gives the interpreter free) or run Python. If it holds
the interpreter inside C++, no Python thread runs: then faulthandler's timer, which needs none, writes the stacks and
ends the process. Ranks meet in files, not through the store: its connection may be the one that hangs.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from titan5d.config.schema import Config
from titan5d.launch import exit_status
from titan5d.launch.flight_recorder import FlightRecorder
from titan5d.launch.heartbeat import Heartbeat, read_heartbeats
from titan5d.launch.last_call import LastCall
from titan5d.launch.record import (
    TORCH,
    CallRecord,
    GroupRecord,
    RankRecord,
    Why,
    read_records,
    record_files,
    write_record,
)
from titan5d.launch.stacks import all_stacks, outermost_cause, training_threads
from titan5d.launch.torch_trace import TorchTrace
from titan5d.launch.traces import read_traces
from titan5d.launch.verdict import VERDICT, judge, write_verdict
from titan5d.launch.wording import short_place, waited_for, when

log = logging.getLogger("titan5d")

GRACE = 5.0
"""Seconds for all ranks to leave their records after the first. Torch's own limits are set this much later than the
watchdog's, so that torch does not tear down what is to be looked at."""
LEAVE_FIRST = 1.0
"""Seconds by which a rank that raised an error leaves before the others: launchers report the first to leave."""
RECENT = 256
"""Calls in a record; the whole ring is in a file beside it."""
START = "start"
PATIENT_PHASES = (START, "checkpoint", "")
"""Where a rank may keep others waiting in a patient group, since it reads or writes files."""


@dataclass(frozen=True)
class Progress:
    """Where a rank stands: phase `phase` of step `step` ("" between phases) since `since` (time.monotonic), collectives
    limited to `limit` seconds."""

    step: int
    phase: str
    since: float
    limit: float


def alone(record: RankRecord, folder: Path, problem: OSError) -> str:
    """What can be said of one rank when there is no place for records."""
    text = f"{folder} cannot be used ({problem.strerror}), so ranks cannot compare where they stand. "
    text += f"Rank {record.rank} ({record.host}) in {when(record.step, record.phase)}: "
    if record.error:
        return f"{text}{record.error}, raised at {short_place(record.error_at)}"
    axes = {group.name: group for group in record.groups}
    waits = [
        "waits in "
        + waited_for(
            call, record.rank, axes[call.group].axis, axes[call.group].ranks, record.at - call.start
        )
        for call in record.waits
        if call.group in axes
    ]
    stands = [short_place(place) for place in record.stacks.get("MainThread", [])[:1]]
    return text + ("; ".join(waits) or f"its Python stands at {', '.join(stands)}")


class Watchdog:
    """Watches this rank from `start` to `stop`. One for each process.

    Args:
        folder: for this start of the run, the same on all ranks; should be seen by all machines.
        prefix: of the names of files, before the rank.
        limit: seconds a collective may take, until `watch` knows better.
        calls: size of the flight recorder.
    """

    def __init__(
        self, folder: Path, prefix: str, rank: int, world: int, limit: float, calls: int, device_type: str
    ) -> None:
        self.folder, self.prefix, self.rank, self.world = folder, prefix, rank, world
        self.recorder = FlightRecorder(calls)
        self.torch_trace = TorchTrace(device_type)
        begun = time.monotonic()
        self._progress: Callable[[], Progress] = lambda: Progress(0, START, begun, limit)
        assert dist.group.WORLD is not None
        self._limited: set[str] | None = {dist.group.WORLD.group_name}  # None = all groups
        self._patient: set[str] = set()
        self._patience = math.inf
        self._stopping = threading.Event()
        self._reporting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="titan5d watchdog", daemon=True)
        self._can_write = True
        self._frozen: TextIO | None = None

    @classmethod
    def of_run(cls, config: Config, rank: int, world: int, device_type: str) -> Watchdog | None:
        """The watchdog as a run's config has it, started; None for a single rank and with comm.trace_buf_size = 0.
        Collective."""
        comm = config.comm
        if world == 1 or comm.trace_buf_size == 0:
            return None
        named = [time.strftime("%Y%m%d-%H%M%S")]  # a restarted run keeps what its earlier start left
        dist.broadcast_object_list(named, src=0)
        folder = Path(config.job.dump_folder) / comm.save_traces_folder / named[0]
        limit = float(comm.init_timeout_seconds)
        watchdog = cls(
            folder, comm.save_traces_file_prefix, rank, world, limit, comm.trace_buf_size, device_type
        )
        watchdog.start()
        return watchdog

    def start(self) -> None:
        """Begins to record and to watch."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._frozen = (self.folder / f"{self.prefix}{self.rank}.frozen").open("w")
            self.recorder.last = LastCall(self.folder / f"{self.prefix}{self.rank}.last")
            faulthandler.enable(self._frozen)  # for aborts and crashes in C++
        except OSError as error:
            self._cannot_write(error)
        self.recorder.__enter__()
        self._sign_of_life()
        self._thread.start()

    def watch(
        self,
        groups: Mapping[str, dist.ProcessGroup],
        progress: Callable[[], Progress],
        patient: dist.ProcessGroup | None = None,
        patience: float = math.inf,
    ) -> None:
        """From now on all groups are watched.

        Args:
            groups: axis -> this rank's group, e.g. `Meshes.groups()`.
            progress: called from another thread, often.
            patient: a group in which ranks wait for others that read or write files; see PATIENT_PHASES.
            patience: for how many seconds.
        """
        self.recorder.name_axes(groups)
        self._progress = progress
        self._patient, self._patience = set() if patient is None else {patient.group_name}, patience
        self._limited = None
        self._sign_of_life()

    def stop(self) -> None:
        """Ends watching. Leaves nothing behind."""
        self._stopping.set()
        self._thread.join(timeout=GRACE)
        faulthandler.cancel_dump_traceback_later()
        self.recorder.__exit__()
        if self._frozen is not None:
            faulthandler.disable()
            self._frozen.close()
        if self.recorder.last is not None:
            self.recorder.last.close()
        for kind in ("frozen", "beat", "last"):
            with suppress(OSError):
                (self.folder / f"{self.prefix}{self.rank}.{kind}").unlink()
        for folder in (self.folder, self.folder.parent):
            with suppress(OSError):  # others are still in it
                folder.rmdir()

    def failed(self, error: BaseException) -> None:
        """Call with the error that ends this rank: leaves its record and helps to the verdict before it goes."""
        if self._reporting.acquire(blocking=False):
            self._report("raised", error)
        else:  # the thread is at it, and will end this process
            self._thread.join(timeout=4 * GRACE)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            limit = self._progress().limit
            if self._frozen is not None:
                faulthandler.dump_traceback_later(limit, exit=True, file=self._frozen)
            if self._stopping.wait(min(1.0, max(0.1, limit / 20))):
                return
            self._sign_of_life()
            why: Why | None = "asked" if self._alarm.exists() else "waits" if self._overdue() else None
            if why is not None and self._reporting.acquire(blocking=False):
                faulthandler.cancel_dump_traceback_later()  # this thread runs: it ends the process
                try:
                    if self._report(why):
                        time.sleep(LEAVE_FIRST)
                except Exception:  # whatever goes wrong here, no process stays
                    log.exception("rank %d found a hang, but its watchdog failed", self.rank)
                exit_status.leave_at_once()

    @property
    def _alarm(self) -> Path:
        return self.folder / "alarm"

    def _sign_of_life(self) -> None:
        if not self._can_write:
            return
        progress = self._progress()
        waits = any(thread.ident in self.recorder.waits for thread in training_threads())
        beat = Heartbeat(
            self.rank, socket.gethostname(), os.getpid(), time.time(), progress.step, progress.phase, waits
        )
        try:
            beat.write(self.folder, self.prefix)
        except OSError as error:
            self._cannot_write(error)

    def _cannot_write(self, error: OSError) -> None:
        self._can_write = False
        log.warning(
            "the watchdog of rank %d cannot write to %s (%s): a hang would be reported without this rank",
            self.rank,
            self.folder,
            error.strerror,
        )

    def _overdue(self) -> bool:
        """Whether a collective of this rank takes longer than it may."""
        now, limit = time.monotonic(), self._progress().limit
        waits = list(self.recorder.waits.values())
        if not waits:
            return any(self._may_not_wait(name) for name in self.torch_trace.stuck(limit, now))
        return any(
            now - since > limit and (now - since > self._patience or self._may_not_wait(call.group.name))
            for call, since in waits
        )

    def _may_not_wait(self, group: str) -> bool:
        if self._limited is not None and group not in self._limited:
            return False
        if group not in self._patient:
            return True
        beats = read_heartbeats(self.folder, self.prefix).values()
        return any(not beat.waits and beat.phase not in PATIENT_PHASES for beat in beats)

    # -- the report ------------------------------------------------------------------------------------------------

    def _report(self, why: Why, error: BaseException | None = None) -> bool:
        """Leaves this rank's record, and on one rank prints the verdict. Returns whether an error was raised
        anywhere."""
        record = self._record(why, error)
        try:
            write_record(self.folder, self.prefix, record, self.recorder.calls())
            self._alarm.touch()
            self._wait_for(lambda: len(record_files(self.folder, self.prefix)) == self.world)
            judged = (self.folder / VERDICT).exists()  # before this rank, which had been stopped, came to it
            if judged or min(record_files(self.folder, self.prefix)) != self.rank:
                self._wait_for((self.folder / VERDICT).exists)
                records = {self.rank: record}
                if (self.folder / VERDICT).exists():
                    records = read_records(self.folder, self.prefix)
                return any(one.why == "raised" for one in records.values())
            records = read_records(self.folder, self.prefix)
        except OSError as problem:  # nobody can be compared with anybody
            with suppress(OSError):
                self._alarm.touch()
            print(f"titan5d: {alone(record, self.folder, problem)}", file=sys.stderr, flush=True)
            return why == "raised"
        damaged = set(record_files(self.folder, self.prefix)) - set(records)
        verdict = judge(records, read_traces(self.folder, self.prefix), self.world, damaged)
        clock = time.strftime("%H:%M:%S")
        lines = verdict.text.replace("\n", "\n    ")
        run_folder = self.folder.parent.parent
        print(
            f"titan5d: {clock} {lines}\n    records: {self.folder}; `titan5d diagnose {run_folder}` says this again",
            file=sys.stderr,
            flush=True,
        )
        with suppress(OSError):
            write_verdict(self.folder, verdict)
        return any(one.why == "raised" for one in records.values())

    def _wait_for(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GRACE
        while not done() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _record(self, why: Why, error: BaseException | None) -> RankRecord:
        progress, recorder = self._progress(), self.recorder
        groups = recorder.groups()
        calls = recorder.calls(RECENT)
        more_groups, more_calls = self._of_torch(groups, anyone_waits=bool(recorder.waits))
        return RankRecord(
            rank=self.rank,
            world=self.world,
            host=socket.gethostname(),
            pid=os.getpid(),
            at=time.time(),
            why=why,
            step=progress.step,
            phase=progress.phase,
            phase_seconds=time.monotonic() - progress.since,
            limit=progress.limit,
            error="" if error is None else f"{type(error).__name__}: {error}",
            error_at="" if error is None else outermost_cause(error),
            stacks=all_stacks(error, without=self._thread),
            groups=[*groups, *more_groups],
            calls=[*calls, *more_calls],
        )

    def _of_torch(
        self, known: list[GroupRecord], anyone_waits: bool
    ) -> tuple[list[GroupRecord], list[CallRecord]]:
        """What torch itself has on record. Its oldest collective that is not over counts as waited for where the
        recorder sees no wait."""
        axes = {group.name: (group.axis, group.ranks) for group in known}
        groups, calls = [], []
        for group in self.torch_trace.groups():
            axis, ranks = axes.get(group.name) or self.recorder.axis_of_name(group.name)
            groups.append(GroupRecord(TORCH + group.name, axis, ranks, group.enqueued))
            stuck = group.completed + 1 if group.under_way and not anyone_waits else None
            calls += [replace(call, state="waits") if call.seq == stuck else call for call in group.calls]
        return groups, calls
