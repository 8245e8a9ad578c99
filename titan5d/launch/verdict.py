"""From the records of all ranks to one verdict: who waits in which collective of which axis, and who did not come.

    rank 0   dp_shard #12 waits ----+
    rank 1   dp_shard #12 waits ----+-->  rank 2 has called only #11 of dp_shard, and its Python stands at data.py:40
    rank 2   (runs Python)

A rank waits for those ranks of its collective that have called fewer collectives of that group than it has. Following
these arrows ends at a rank that waits for nobody: it is the one to look at. If they end nowhere, ranks wait for each
other in a circle: they call collectives in different orders. The same number with another operation or another shape
is named first, since everything after it is its consequence. Where ranks only lost a peer, or their patience, those
are to look at that neither failed nor wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path

from titan5d.launch.failure import LOST_PEER
from titan5d.launch.heartbeat import process_state
from titan5d.launch.mismatch import Mismatch, find_mismatches
from titan5d.launch.record import BESIDE, READS_AHEAD, UNREADABLE, RankRecord, write_whole
from titan5d.launch.traces import Traces
from titan5d.launch.waits import Wait, find_waits, last_in_line
from titan5d.launch.wording import called, count_of, numbered, rank_list, short_place, sized, waited_for, when

VERDICT = "verdict.json"
SHOWN_RANKS = 8
"""Ranks that get lines of their own."""
SHOWN_FRAMES = 6
SHOWN_ASKING = 2
"""Frames of a main thread that waits for another thread."""
SHOWN_ERROR = 200
"""Characters of an error that only follows from another."""
NOT_SHOWN = (
    "/site-packages/torch/",
    "/typing_extensions.py:",
    "/launch/flight_recorder.py:",
    "/metrics/exposed.py:",
    "/parallel/turns.py:",
)
"""Torch, those who watch it, and where a micro-batch of an overlapped slot waits for its turn."""
PREFETCH = "/data/prefetch.py:"
"""Where the main thread waits for the thread that reads data ahead."""


@dataclass(frozen=True)
class Verdict:
    """What happened.

    Attributes:
        kind: "raised" (an error ended a rank), "lost" (a rank left no record), "mismatch" (ranks called different
            things), "order" (they wait for each other in a circle), "late" (a rank did not come), "unclear".
        culprits: the ranks to look at first.
        text: all of it for people.
        records: the ranks whose records it follows from.
        at: when it was found, in seconds since the epoch.
    """

    kind: str
    culprits: list[int]
    text: str
    waits: list[Wait] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    at: float = 0.0


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Leaves the verdict beside the records it follows from. The first one stays: a rank that was stopped may judge
    once more when it goes on, from records of different times."""
    try:
        read_verdict(folder)
    except UNREADABLE:
        write_whole(folder / VERDICT, json.dumps(asdict(verdict), indent=1), to_disk=True)


def read_verdict(folder: Path) -> Verdict:
    """The verdict that was left in a folder, without its waits and mismatches. Raises one of `UNREADABLE`."""
    file = folder / VERDICT
    values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, Mapping):
        raise ValueError("it is no verdict")
    # earlier versions did not write when; the file was written at once
    at = values["at"] if "at" in values else file.stat().st_mtime
    found = Verdict(values["kind"], values["culprits"], values["text"], records=values["records"], at=at)
    if not isinstance(found.kind, str) or not isinstance(found.text, str) or not isinstance(at, int | float):
        raise ValueError("it is no verdict")
    for ranks in (found.culprits, found.records):
        if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
            raise ValueError("it is no verdict")
    return found


def judge(
    records: Mapping[int, RankRecord], traces: Traces, world: int, damaged: Collection[int] = ()
) -> Verdict:
    """The verdict of the records that there are, and of the traces of ranks without one.

    `damaged`: ranks whose records cannot be read. They were alive to write them, so they are not lost.
    Raises ValueError when there is no record.
    """
    if not records:
        raise ValueError("there is no record of any rank")
    missing = [rank for rank in range(world) if rank not in records]
    # those without a sign of life never showed in this folder
    lost = [rank for rank in missing if rank in traces.beats and rank not in damaged]
    last = {rank: call for rank, call in traces.calls.items() if rank in missing}
    waits, mismatches = find_waits(records, last), find_mismatches(records, last)
    raised = sorted((record for record in records.values() if record.why == "raised"), key=lambda one: one.at)
    causes = [record for record in raised if not LOST_PEER.search(record.error)]
    if mismatches:  # what is raised after that is its consequence
        kind, culprits = "mismatch", mismatches[0].ranks
    elif causes:
        kind, culprits = "raised", _same_error(causes)
    elif lost:
        kind, culprits = "lost", lost
    else:
        kind, culprits = last_in_line(records, waits)
        if raised and kind != "order":
            kind, culprits = _without_failed(records, kind, culprits, bool(missing))
    if kind == "unclear" and missing:
        kind, culprits = "lost", [rank for rank in missing if rank not in damaged] or missing
    elif kind == "unclear" and raised:
        kind, culprits = "raised", [raised[0].rank]
    parts = [_headline(kind, culprits, records, mismatches, world, damaged)]
    parts += [str(mismatch) for mismatch in mismatches]
    parts += [_wait_line(wait) for wait in waits]
    noticed = [record for record in raised if kind != "raised" or record.rank not in culprits]
    parts += [_noticed(record) for record in noticed[:SHOWN_RANKS]]
    if len(noticed) > SHOWN_RANKS:
        parts.append(f"... and {count_of(len(noticed) - SHOWN_RANKS, 'rank')} more failed after that")
    shown = list(dict.fromkeys([*culprits, *lost, *(rank for wait in waits for rank in wait.absent)]))
    for rank in shown[:SHOWN_RANKS]:
        if rank in records:
            parts.append(_where(records[rank], waits))
        else:
            left = "a record that cannot be read" if rank in damaged else "no record"
            parts.append(_last_seen(rank, traces, records, left))
    if len(shown) > SHOWN_RANKS:
        parts.append(f"... and {count_of(len(shown) - SHOWN_RANKS, 'rank')} more")
    return Verdict(kind, culprits, "\n".join(parts), waits, mismatches, sorted(records), time.time())


def later_record(record: RankRecord, verdict: Verdict) -> str:
    """What to add to a verdict about a rank that left its record only after it."""
    error = f": {_shortened(record.error)}" if record.error else ""
    header = (
        f"rank {record.rank} left its record {record.at - verdict.at:.1f} s later, in"
        f" {when(record.step, record.phase)}{error}"
    )
    return "\n".join([header, *_stands(record)])


def _without_failed(
    records: Mapping[int, RankRecord], kind: str, culprits: list[int], anyone_missing: bool
) -> tuple[str, list[int]]:
    """(kind, culprits) where all errors are those of ranks that lost a peer or their patience: these were not late."""
    idle = [rank for rank in sorted(records) if records[rank].why == "asked" and not records[rank].waits]
    late = [rank for rank in culprits if rank in idle]
    if not late and not anyone_missing:  # else the missing may be the lost peers
        late = idle
    return ("late", late) if late else (kind, culprits)


def _same_error(causes: Sequence[RankRecord]) -> list[int]:
    """The first rank with an error of its own, and those with the same error."""
    return sorted(record.rank for record in causes if record.error == causes[0].error)


def _headline(
    kind: str,
    culprits: Sequence[int],
    records: Mapping[int, RankRecord],
    mismatches: Sequence[Mismatch],
    world: int,
    damaged: Collection[int],
) -> str:
    who = rank_list(culprits)
    if kind == "raised":
        record = records[culprits[0]]
        at = f", raised at {short_place(record.error_at)}" if record.error_at else ""
        return f"{who} failed in {when(record.step, record.phase)}: {record.error}{at}"
    waiting = sum(bool(record.waits) for record in records.values())
    state = f"{waiting} of {count_of(world, 'rank')} wait" if waiting else "nobody waits"
    if kind == "lost":
        unread = "records that cannot be read" if len(culprits) > 1 else "a record that cannot be read"
        left = unread if set(culprits) <= set(damaged) else "no record"
        return f"the run cannot go on: {who} left {left}; {state}"
    if kind == "mismatch":
        axis = mismatches[0].axis
        return f"the run cannot go on: ranks do not call the same collective of {axis}; {state}"
    if kind == "order":
        return f"the run hangs: {who} wait for each other, since they call collectives in different orders"
    failed = [rank for rank, record in records.items() if record.why == "raised"]
    if kind == "late" and failed:
        consequence = f"{rank_list(failed)} failed without {'it' if len(culprits) == 1 else 'them'}"
        rest = f"; {state}" if waiting else ""
        return f"the run cannot go on: {who} did not come: {consequence}{rest}"
    if kind == "late":
        return f"the run hangs: {state}, {who} did not come"
    return f"the run hangs: {state}, and all ranks have called what they wait for: look at the network"


def _wait_line(wait: Wait) -> str:
    call = wait.call
    verb = "waits" if len(wait.ranks) == 1 else "wait"
    what = waited_for(call, wait.ranks[0], wait.axis, wait.group_ranks, wait.seconds)
    where = f"\n    called at {' <- '.join(map(short_place, call.at))}" if call.at else ""
    absent = f"; {rank_list(wait.absent)} did not come" if wait.absent else "; all its ranks have called it"
    return f"{rank_list(wait.ranks)} {verb} in {what}{absent}{where}"


def _noticed(record: RankRecord) -> str:
    """A rank that failed since another had."""
    place = short_place(record.error_at)
    return f"rank {record.rank} failed after that, at {place}: {_shortened(record.error)}"


def _shortened(error: str) -> str:
    error = " ".join(error.split())
    return error if len(error) <= SHOWN_ERROR else error[:SHOWN_ERROR] + " ..."


def _where(record: RankRecord, waits: Sequence[Wait]) -> str:
    """Where a rank stands, and how far it is on the groups in which others wait for it."""
    waiting = "; it waits itself" if record.waits else ""
    lines = [
        f"rank {record.rank} ({record.host}, process {record.pid}) is in {when(record.step, record.phase)} for"
        f" {record.phase_seconds:.1f} s{waiting}"
    ]
    for wait in waits:
        if record.rank in wait.absent and wait.call.op not in ("send", "recv"):
            group = next((one for one in record.groups if one.name == wait.call.group), None)
            before = numbered(group.calls) if group is not None and group.calls else "none"
            due = called(wait.call, record.rank)
            lines.append(f"    its last collective of {wait.axis}: {before}; {due} is due")
    return "\n".join([*lines, *_stands(record)])


def _stands(record: RankRecord) -> list[str]:
    """Lines with where the Python of a rank stands: that of the thread that reads data, if the main thread waits for
    it."""
    main, reader = record.stacks.get("MainThread", []), record.stacks.get(READS_AHEAD, [])
    if reader and any(PREFETCH in place for place in main):
        reads = list(takewhile(lambda place: PREFETCH not in place, reader))
        within = [index for index, place in enumerate(main) if PREFETCH in place]
        asks = main[within[-1] + 1 :]
        waiting = "in the thread that reads data ahead; the main thread waits for it at"
        return _stack(reads or reader) + _stack(asks[:SHOWN_ASKING], waiting)
    beside = _stack(record.stacks.get(BESIDE, []), "and, for the other micro-batch of an overlapped slot, at")
    return _stack(main) + beside


def _last_seen(rank: int, traces: Traces, records: Mapping[int, RankRecord], left: str) -> str:
    """What is known of a rank without a record, or with `left` in place of one."""
    beat, call = traces.beats.get(rank), traces.calls.get(rank)
    if beat is None:
        return f"rank {rank} left {left} and no sign of life in this folder (is it shared by all machines?)"
    age = max(0.0, max(record.at for record in records.values()) - beat.at)
    clock = time.strftime("%H:%M:%S", time.localtime(beat.at))
    doing = ", waiting in a collective" if beat.waits else ""
    lines = [
        f"rank {rank} left {left}: {process_state(beat)}; last sign of life at {clock}, {age:.1f} s before the"
        f" others' records: {when(beat.step, beat.phase)}{doing}"
    ]
    if call is not None:
        axes = {group.name: group.axis for record in records.values() for group in record.groups}
        axis = axes.get(call.group, f"group {call.group}")
        lines.append(f"    its last collective: {called(call, rank)} of {axis}, {sized(call)}")
    return "\n".join([*lines, *_stack(traces.frozen.get(rank, []))])


def _stack(places: Sequence[str], title: str = "its Python stands at") -> list[str]:
    """Lines with where Python stands, without torch's own frames if there are others."""
    shown = [place for place in places if not any(part in place for part in NOT_SHOWN)] or list(places)
    if not shown:
        return []
    return [f"    {title}", *(f"        {short_place(place)}" for place in shown[:SHOWN_FRAMES])]
