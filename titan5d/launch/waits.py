"""Who waits for whom: ranks that stand still in a collective or for a message, and those that have not called it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan5d.launch.record import CallRecord, GroupRecord, RankRecord


@dataclass(frozen=True)
class Wait:
    """Ranks that stand still for one collective or message, and those they wait for.

    Attributes:
        axis, group_ranks: of the process group.
        ranks: those that wait.
        absent: those that have not called it; some may have left no record.
        seconds: of the one that waits longest.
    """

    axis: str
    group_ranks: tuple[int, ...]
    call: CallRecord
    ranks: list[int]
    absent: list[int]
    seconds: float


def find_waits(records: Mapping[int, RankRecord], last: Mapping[int, CallRecord] | None = None) -> list[Wait]:
    """All waits, the longest first. Ranks in the same collective share one.

    `last`: the last calls of ranks without a record.
    """
    groups = {(record.rank, group.name): group for record in records.values() for group in record.groups}
    found: dict[tuple[str, int, str, int], Wait] = {}
    for record in records.values():
        for call in record.waits:
            group = groups[record.rank, call.group]
            message = call.op in ("send", "recv")
            key = call.group, call.seq, call.op, record.rank if message else -1
            seconds = record.at - call.start
            if key in found:
                earlier = found[key]
                ranks = sorted({*earlier.ranks, record.rank})
                longest = max(seconds, earlier.seconds)
                found[key] = Wait(group.axis, group.ranks, earlier.call, ranks, earlier.absent, longest)
                continue
            absent = [
                rank
                for rank in group.ranks
                if not _has_called(groups.get((rank, call.group)), rank, record.rank, call)
                and not _called_last((last or {}).get(rank), call)
            ]
            found[key] = Wait(group.axis, group.ranks, call, [record.rank], absent, seconds)
    return sorted(found.values(), key=lambda wait: -wait.seconds)


def last_in_line(records: Mapping[int, RankRecord], waits: Sequence[Wait]) -> tuple[str, list[int]]:
    """Follows who waits for whom: ("late", ranks that wait for nobody), ("order", ranks of a circle), or
    ("unclear", those that wait) where all have called everything."""
    waits_for: dict[int, set[int]] = {}
    for wait in waits:
        for rank in wait.ranks:
            waits_for.setdefault(rank, set()).update(wait.absent)
    reached = {rank for wait in waits for rank in wait.absent}
    last = sorted(rank for rank in reached if rank in records and not records[rank].waits)
    if last:
        return "late", last
    circle = sorted(rank for rank in reached if waits_for.get(rank, set()) & set(records))
    return ("order", circle) if circle else ("unclear", sorted(waits_for))


def _has_called(group: GroupRecord | None, rank: int, waiting: int, call: CallRecord) -> bool:
    """Whether `rank`, which is so far on the group, has come to the call that `waiting` waits in; True for a rank that
    has nothing to do with it."""
    if call.op in ("send", "recv"):
        if rank != call.peer:
            return True
        other = "recv" if call.op == "send" else "send"
        made = {(op, peer): count for op, peer, count in group.messages} if group is not None else {}
        return made.get((other, waiting), 0) >= call.seq
    return group is not None and group.calls >= call.seq


def _called_last(last: CallRecord | None, call: CallRecord) -> bool:
    """Whether the last call of a rank without a record is this one or a later one of its group."""
    return last is not None and last.group == call.group and last.op == call.op and last.seq >= call.seq
