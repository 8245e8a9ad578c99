"""From the records of all ranks to one verdict: who waits in which collective of which axis, and who did not come.

    rank 0   dp_shard #12 waits ----+
    rank 1   dp_shard #12 waits ----+-->  rank 2 has called only #11 of dp_shard, and its Python stands at data.py:40
    rank 2   (runs Python)

A rank waits for those ranks of its collective that have called fewer collectives of that group than it has. Following
these arrows ends at a rank that waits for nobody: it is the one to look at. If they end nowhere, ranks wait for each
other in a circle: they call collectives in different orders. The same number with another operation or another shape
is named first, since everything after it is its consequence.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from titan5d.launch.failure import LOST_PEER
from titan5d.launch.heartbeat import process_state
from titan5d.launch.mismatch import Mismatch, find_mismatches
from titan5d.launch.record import BESIDE, RankRecord, write_whole
from titan5d.launch.traces import Traces
from titan5d.launch.waits import Wait, find_waits, last_in_line
from titan5d.launch.wording import called, count_of, numbered, rank_list, short_place, sized, when

VERDICT = "verdict.json"
SHOWN_RANKS = 8
"""Ranks that get lines of their own."""
SHOWN_FRAMES = 6
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


@dataclass(frozen=True)
class Verdict:
    """What happened.

    Attributes:
        kind: "raised" (an error ended a rank), "lost" (a rank left no record), "mismatch" (ranks called different
            things), "order" (they wait for each other in a circle), "late" (a rank did not come), "unclear".
        culprits: the ranks to look at first.
        text: all of it for people.
        records: the ranks whose records it follows from.
    """

    kind: str
    culprits: list[int]
    text: str
    waits: list[Wait] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    records: list[int] = field(default_factory=list)


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Leaves the verdict beside the records it follows from."""
    write_whole(folder / VERDICT, json.dumps(asdict(verdict), indent=1))


def judge(records: Mapping[int, RankRecord], traces: Traces, world: int) -> Verdict:
    """The verdict of the records that there are, and of the traces of ranks without one.

    Raises ValueError when there is no record.
    """
    if not records:
        raise ValueError("there is no record of any rank")
    missing = [rank for rank in range(world) if rank not in records]
    lost = [rank for rank in missing if rank in traces.beats]  # the others never showed in this folder
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
    if kind == "unclear" and missing:
        kind, culprits = "lost", missing
    elif kind == "unclear" and raised:
        kind, culprits = "raised", [raised[0].rank]
    parts = [_headline(kind, culprits, records, mismatches, world)]
    parts += [str(mismatch) for mismatch in mismatches]
    parts += [_wait_line(wait) for wait in waits]
    parts += [_noticed(record) for record in raised if kind != "raised" or record.rank not in culprits]
    shown = list(dict.fromkeys([*culprits, *lost, *(rank for wait in waits for rank in wait.absent)]))
    for rank in shown[:SHOWN_RANKS]:
        parts.append(_where(records[rank], waits) if rank in records else _last_seen(rank, traces, records))
    if len(shown) > SHOWN_RANKS:
        parts.append(f"... and {count_of(len(shown) - SHOWN_RANKS, 'rank')} more")
    return Verdict(kind, culprits, "\n".join(parts), waits, mismatches, sorted(records))


def _same_error(causes: Sequence[RankRecord]) -> list[int]:
    """The first rank with an error of its own, and those with the same error."""
    return sorted(record.rank for record in causes if record.error == causes[0].error)


def _headline(
    kind: str,
    culprits: Sequence[int],
    records: Mapping[int, RankRecord],
    mismatches: Sequence[Mismatch],
    world: int,
) -> str:
    who = rank_list(culprits)
    if kind == "raised":
        record = records[culprits[0]]
        at = f", raised at {short_place(record.error_at)}" if record.error_at else ""
        return f"{who} failed in {when(record.step, record.phase)}: {record.error}{at}"
    waiting = sum(bool(record.waits) for record in records.values())
    state = f"{waiting} of {count_of(world, 'rank')} wait" if waiting else "nobody waits"
    if kind == "lost":
        return f"the run cannot go on: {who} left no record; {state}"
    if kind == "mismatch":
        axis = mismatches[0].axis
        return f"the run cannot go on: ranks do not call the same collective of {axis}; {state}"
    if kind == "order":
        return f"the run hangs: {who} wait for each other, since they call collectives in different orders"
    if kind == "late":
        return f"the run hangs: {state}, {who} did not come"
    return f"the run hangs: {state}, and all ranks have called what they wait for: look at the network"


def _wait_line(wait: Wait) -> str:
    call = wait.call
    verb = "waits" if len(wait.ranks) == 1 else "wait"
    what = f"{called(call, wait.ranks[0])} of {wait.axis} ({rank_list(wait.group_ranks)})"
    where = f"\n    called at {' <- '.join(map(short_place, call.at))}" if call.at else ""
    absent = f"; {rank_list(wait.absent)} did not come" if wait.absent else "; all its ranks have called it"
    return f"{rank_list(wait.ranks)} {verb} in {what}, {sized(call)}, for {wait.seconds:.1f} s{absent}{where}"


def _noticed(record: RankRecord) -> str:
    """A rank that failed since another had."""
    error = " ".join(record.error.split())
    error = error if len(error) <= SHOWN_ERROR else error[:SHOWN_ERROR] + " ..."
    return f"rank {record.rank} failed after that, at {short_place(record.error_at)}: {error}"


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
    lines += _stack(record.stacks.get("MainThread", []))
    lines += _stack(record.stacks.get(BESIDE, []), "and, for the other micro-batch of an overlapped slot, at")
    return "\n".join(lines)


def _last_seen(rank: int, traces: Traces, records: Mapping[int, RankRecord]) -> str:
    """What is known of a rank without a record."""
    beat, call = traces.beats.get(rank), traces.calls.get(rank)
    if beat is None:
        return (
            f"rank {rank} left no record and no sign of life in this folder (is it shared by all machines?)"
        )
    age = max(0.0, max(record.at for record in records.values()) - beat.at)
    clock = time.strftime("%H:%M:%S", time.localtime(beat.at))
    doing = ", waiting in a collective" if beat.waits else ""
    lines = [
        f"rank {rank} left no record: {process_state(beat)}; last sign of life at {clock}, {age:.1f} s before the"
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
