"""What a rank leaves behind when a run hangs or fails, as plain values in a file that a reader needs no torch for.

    <run folder>/comm_traces/<start of the run>/
        rank_0.json ...     RankRecord: where this rank stands, and its newest collectives
        rank_0.calls.jsonl  all collectives in its ring, one CallRecord a line, oldest first
        rank_0.beat         Heartbeat: signs of life while it runs
        verdict.json        what follows from all of them (verdict.py)

Files are written under another name first, so that nobody reads half of one.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

BESIDE = "second of two in turns"
"""The name of the thread that works in turns with the main thread, in overlapped slots (parallel/turns.py)."""
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
    write_whole(folder / f"{prefix}{record.rank}.calls.jsonl", lines)
    # last: where it is, all is
    write_whole(folder / f"{prefix}{record.rank}.json", json.dumps(asdict(record), indent=1))


def read_records(folder: Path, prefix: str) -> dict[int, RankRecord]:
    """Rank -> its record, of all that there are."""
    return {
        rank: _record(json.loads(file.read_text(encoding="utf-8")))
        for rank, file in sorted(record_files(folder, prefix).items())
    }


def read_ring(folder: Path, prefix: str, record: RankRecord) -> list[CallRecord]:
    """All calls a rank had on record, also those that are in its record only."""
    try:
        lines = (folder / f"{prefix}{record.rank}.calls.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:  # not copied along
        return record.calls
    calls = [CallRecord(**json.loads(line)) for line in lines]
    return [*calls, *(call for call in record.calls if call not in calls)]


def record_files(folder: Path, prefix: str) -> dict[int, Path]:
    """Rank -> the file of its record."""
    found = {}
    for file in folder.glob(f"{prefix}*.json"):
        rank = file.name.removeprefix(prefix).removesuffix(".json")
        if rank.isdigit():
            found[int(rank)] = file
    return found


def _record(values: Mapping[str, Any]) -> RankRecord:
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
    calls = [CallRecord(**call) for call in values["calls"]]
    return RankRecord(**{**values, "groups": groups, "calls": calls})


def write_whole(path: Path, text: str) -> None:
    """Writes a file that readers see whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)
