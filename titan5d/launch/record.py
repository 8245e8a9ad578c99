"""What a rank leaves behind when a run hangs or fails, as plain values in a file that a reader needs no torch for.

    <run folder>/comm_traces/<start of the run>/
        rank_0.json ...     RankRecord: where this rank stands, and its newest collectives
        rank_0.calls.jsonl  all collectives in its ring, one CallRecord a line, oldest first
        rank_0.beat         Heartbeat: signs of life while it runs
        verdict.json        what follows from all of them (verdict.py)

Files are written under another name first, so that nobody reads half of one. One that is damaged all the same (its
machine died, a disk was full, a copy was cut short, another version wrote it) is left out, and the rest is read.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

BESIDE = "second of two in turns"
"""The name of the thread that works in turns with the main thread, in overlapped slots (parallel/turns.py)."""
READS_AHEAD = "titan5d data"
"""The name of the thread that makes the next batches (data/prefetch.py)."""
TORCH = "torch:"
"""Before the names of groups as torch counts them: all collectives, also those the recorder cannot see."""

Why = Literal["waits", "raised", "asked"]
"""Why a rank wrote its record: it waited too long, an error ended it, or another rank did one of these."""


@dataclass(frozen=True)
class CallRecord:
    """One collective or message.

    Attributes:
        group: torch's name of the process group.
        seq: the how manyeth of its group; of a message: of its pair of ranks and direction.
        op: all_reduce, all_gather, ..., send, recv.
        peer: global rank at the other end of a message, or at the centre of a broadcast and the like.
        shapes, dtype: of its first few tensors.
        start, end: seconds since the epoch.
        state: "waits" (a thread stands still for it), "under way" or "done".
        at: innermost callers, "file:line function".
    """

    group: str
    seq: int
    op: str
    peer: int | None = None
    shapes: list[list[int]] = field(default_factory=list)
    dtype: str = ""
    start: float = 0.0
    end: float | None = None
    state: str = "done"
    at: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GroupRecord:
    """How far a rank is on one group: collectives called, and messages by (op, global rank of the peer, count)."""

    name: str
    axis: str
    ranks: tuple[int, ...]
    calls: int = 0
    messages: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class RankRecord:
    """Where one rank stands.

    Attributes:
        at: when, in seconds since the epoch.
        phase, phase_seconds: of the step ("" between phases), and for how long.
        limit: seconds that a collective may take.
        error: type and text of the error that ended the rank, if one did.
        error_at: "file:line function" of where it was raised.
        stacks: thread -> "file:line function", innermost first; the main thread is "MainThread",
            one that works in turns with it `BESIDE`.
        groups: this rank's process groups.
        calls: its newest collectives, oldest first.
    """

    rank: int
    world: int
    host: str
    pid: int
    at: float
    why: Why
    step: int
    phase: str
    phase_seconds: float
    limit: float
    error: str = ""
    error_at: str = ""
    stacks: dict[str, list[str]] = field(default_factory=dict)
    groups: list[GroupRecord] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)

    @property
    def waits(self) -> list[CallRecord]:
        """The calls that this rank's threads stand still for."""
        return [call for call in self.calls if call.state == "waits"]


def write_record(folder: Path, prefix: str, record: RankRecord, ring: Iterable[CallRecord] = ()) -> None:
    """Leaves a rank's record and its whole ring."""
    lines = "".join(json.dumps(asdict(call)) + "\n" for call in ring)
    write_whole(folder / f"{prefix}{record.rank}.calls.jsonl", lines, to_disk=True)
    # last: where it is, all is
    write_whole(folder / f"{prefix}{record.rank}.json", json.dumps(asdict(record), indent=1), to_disk=True)


def read_records(folder: Path, prefix: str, left_out: list[str] | None = None) -> dict[int, RankRecord]:
    """Rank -> its record, of all that can be read. `left_out`: gets a sentence about each of the others."""
    found = {}
    for rank, file in sorted(record_files(folder, prefix).items()):
        try:
            found[rank] = _record(json.loads(file.read_text(encoding="utf-8")), rank)
        except UNREADABLE as error:
            if left_out is not None:
                left_out.append(unreadable(file, error))
    return found


def read_ring(
    folder: Path, prefix: str, record: RankRecord, left_out: list[str] | None = None
) -> list[CallRecord]:
    """All calls a rank had on record, also those that are in its record only. `left_out` as for `read_records`."""
    file = folder / f"{prefix}{record.rank}.calls.jsonl"
    calls: list[CallRecord] = []
    problems = []
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:  # not copied along
        return record.calls
    except OSError as error:
        problems, lines = [unreadable(file, error)], []
    for number, line in enumerate(lines, 1):
        try:
            calls.append(_call(json.loads(line)))
        except UNREADABLE as error:
            problems.append(unreadable(file, error, f" from line {number} on"))
            break  # it was cut off here, or nothing after it can be trusted
    if left_out is not None:
        left_out += problems
    names = {group.name for group in record.groups}
    calls = [call for call in calls if call.group in names]
    return [*calls, *(call for call in record.calls if call not in calls)]


def record_files(folder: Path, prefix: str) -> dict[int, Path]:
    """Rank -> the file of its record."""
    found = {}
    for file in folder.glob(f"{prefix}*.json"):
        rank = file.name.removeprefix(prefix).removesuffix(".json")
        if rank.isdecimal() and rank == str(int(rank)):  # rank_00.json is a copy that somebody made
            found[int(rank)] = file
    return found


UNREADABLE = (OSError, ValueError, TypeError, KeyError)
"""What reading a file of JSON from an unknown past can raise."""


def unreadable(file: Path, error: Exception, part: str = "") -> str:
    """The sentence about a damaged file: "rank_1.json cannot be read (Is a directory)"."""
    if isinstance(error, KeyError):
        why = f"it has no {error}"
    else:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"{file.name} cannot be read{part} ({' '.join(why.split())})"


def _record(values: Any, rank: int) -> RankRecord:
    """Raises one of `UNREADABLE`."""
    if not isinstance(values, Mapping):
        raise ValueError("it is no record")
    groups = [
        GroupRecord(
            **{
                **group,
                "ranks": tuple(group["ranks"]),
                "messages": [(op, peer, count) for op, peer, count in group["messages"]],
            }
        )
        for group in values["groups"]
    ]
    names = {group.name for group in groups}
    # a group that came up while the record was made has calls, but no place among its groups
    calls = [call for call in map(_call, values["calls"]) if call.group in names]
    record = RankRecord(**{**values, "groups": groups, "calls": calls})
    numbers = record.world, record.at, record.step, record.phase_seconds
    texts = record.host, record.why, record.phase, record.error
    fits = all(isinstance(number, int | float) for number in numbers) and isinstance(record.stacks, dict)
    if not fits or not all(isinstance(text, str) for text in texts):
        raise ValueError("a value is of another type")
    if record.rank != rank:
        raise ValueError(f"it is of rank {record.rank}")
    return record


def _call(values: Mapping[str, Any]) -> CallRecord:
    """Raises one of `UNREADABLE`."""
    call = CallRecord(**values)
    if not isinstance(call.seq, int) or not isinstance(call.start, int | float):
        raise ValueError("a value of a call is of another type")
    return call


def write_whole(path: Path, text: str, to_disk: bool = False) -> None:
    """Writes a file that readers see whole or not at all; with `to_disk` also when the machine dies right after.

    Not for what is written every second: a disk that is busy with a checkpoint may take long over it.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        if to_disk:
            file.flush()
            with suppress(OSError):  # some file systems cannot; readers see the text all the same
                os.fsync(file.fileno())
    part.rename(path)
