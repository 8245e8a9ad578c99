"""Ranks that call different things under the same number: another operation, shape, type or root.

Only what must be equal is compared: an all-to-all may bring different sizes on each rank. Of messages the two ends are
compared: gloo copies a short message into a long buffer without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from titan5d.launch.record import TORCH, CallRecord, RankRecord
from titan5d.launch.wording import called, numbered, rank_list, short_place, sized

FREE_SHAPES = ("all_to_all", "gather", "scatter", "barrier")


@dataclass(frozen=True)
class Mismatch:
    """One number of one group under which ranks called different things.

    Attributes:
        calls: one for each kind of call, with the ranks that made it.
    """

    axis: str
    calls: list[tuple[CallRecord, list[int]]]

    @property
    def ranks(self) -> list[int]:
        """The minority: the ranks of all kinds of call but the most frequent one. All, if there is none."""
        most = max(len(ranks) for _, ranks in self.calls)
        if sum(len(ranks) == most for _, ranks in self.calls) > 1:
            return sorted(rank for _, ranks in self.calls for rank in ranks)
        return sorted(rank for _, ranks in self.calls for rank in ranks if len(ranks) < most)

    def __str__(self) -> str:
        first = self.calls[0][0]
        lines = [f"different calls under the same number, {numbered(first.seq)} of {self.axis}:"]
        for call, ranks in self.calls:
            at = f", called at {short_place(call.at[0])}" if call.at else ""
            lines.append(f"    {rank_list(ranks)}: {called(call, ranks[0])}, {sized(call)}{at}")
        return "\n".join(lines)


def find_mismatches(
    records: Mapping[int, RankRecord], last: Mapping[int, CallRecord] | None = None
) -> list[Mismatch]:
    """The first mismatch of each group, the earliest first. `last`: the last calls of ranks without a record."""
    found = [*_collectives(records, last or {}), *_messages(records)]
    return sorted(found, key=lambda mismatch: min(call.start for call, _ in mismatch.calls))


def _collectives(records: Mapping[int, RankRecord], last: Mapping[int, CallRecord]) -> Iterator[Mismatch]:
    axes = {group.name: group.axis for record in records.values() for group in record.groups}
    calls: dict[tuple[str, int], list[tuple[int, CallRecord]]] = {}
    by_rank = {rank: record.calls for rank, record in records.items()}
    by_rank |= {rank: [call] for rank, call in last.items() if call.group in axes}
    for rank, made in sorted(by_rank.items()):
        for call in made:
            if call.op not in ("send", "recv") and not call.group.startswith(TORCH):
                calls.setdefault((call.group, call.seq), []).append((rank, call))
    done = set()
    for (group, _), at_once in sorted(calls.items(), key=lambda item: item[0][1]):
        if group in done:
            continue
        kinds: dict[tuple[object, ...], tuple[CallRecord, list[int]]] = {}
        for rank, call in at_once:
            kinds.setdefault(_must_be_equal(call), (call, []))[1].append(rank)
        if len(kinds) > 1:
            done.add(group)
            yield Mismatch(axes[group], list(kinds.values()))


def _must_be_equal(call: CallRecord) -> tuple[object, ...]:
    shapes = "" if call.op in FREE_SHAPES else str(call.shapes)
    return call.op, call.dtype, shapes, call.peer


def _messages(records: Mapping[int, RankRecord]) -> Iterator[Mismatch]:
    axes = {group.name: group.axis for record in records.values() for group in record.groups}
    sent: dict[tuple[str, int, int, int], CallRecord] = {}
    for record in records.values():
        for call in record.calls:
            if call.op == "send" and call.peer is not None:
                sent[call.group, call.seq, record.rank, call.peer] = call
    for record in records.values():
        for call in record.calls:
            if call.op != "recv" or call.peer is None:
                continue
            other = sent.get((call.group, call.seq, call.peer, record.rank))
            if other is not None and _bytes_of(other) != _bytes_of(call):
                yield Mismatch(axes[call.group], [(other, [call.peer]), (call, [record.rank])])
                break


def _bytes_of(call: CallRecord) -> tuple[str, int]:
    return call.dtype, sum(prod(shape) for shape in call.shapes)
