"""Torch's own record of collectives, read while they hang: it alone has functional collectives, and on NCCL it knows
what the GPU has finished.

It is kept in C++ for NCCL and gloo. Its states are not reliable on gloo (finished operations stay "scheduled"), the
counts of each group are: enqueued and completed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from titan5d.launch.record import TORCH, CallRecord

NEWEST = 32
"""Calls of each group that are taken over."""


@dataclass(frozen=True)
class TorchGroup:
    """Counts of one group: collectives enqueued and completed; its newest calls, oldest first."""

    name: str
    enqueued: int
    completed: int
    calls: tuple[CallRecord, ...] = ()

    @property
    def under_way(self) -> bool:
        return self.enqueued > self.completed


class TorchTrace:
    """Torch's record of this process; empty where this build of torch keeps none."""

    def __init__(self, device_type: str) -> None:
        name = "_dump_nccl_trace_json" if device_type == "cuda" else "_dump_fr_trace_json"
        self._dump: Any = getattr(torch._C._distributed_c10d, name, None)
        self._since: dict[
            str, tuple[int, float]
        ] = {}  # torch's number of a group -> completed so far, since when
        self._looked = 0.0

    def groups(self) -> list[TorchGroup]:
        """What torch knows of each group now."""
        if self._dump is None:
            return []
        return parse(json.loads(self._dump(includeCollectives=True, onlyActive=False)))

    def stuck(self, limit: float, now: float) -> list[str]:
        """Names of the groups in which the same collective has been under way for more than `limit` seconds.

        To be called often; it looks every `limit` / 8. `now`: time.monotonic().
        """
        if self._dump is None or now - self._looked < limit / 8:
            return []
        self._looked = now
        counts = json.loads(self._dump(includeCollectives=False, onlyActive=False)).get("pg_status", {})
        under_way = {}
        for number, status in counts.items():
            enqueued, completed = _counts(status)
            if enqueued > completed:
                before, since = self._since.get(number, (completed, now))
                under_way[number] = (completed, since if before == completed else now)
        self._since = under_way
        if not any(now - since > limit for _, since in under_way.values()):
            return []
        return [group.name for group in self.groups() if group.under_way]


def parse(trace: dict[str, Any]) -> list[TorchGroup]:
    """The groups of one dump of torch's flight recorder."""
    names: dict[str, str] = {}  # torch's number of a group -> its name
    calls: dict[str, list[CallRecord]] = {}
    for entry in trace.get("entries", []):
        number, name = str(entry["pg_id"]), entry["process_group"][0]
        names[number] = name
        if entry.get("is_p2p"):
            continue
        calls.setdefault(number, []).append(
            CallRecord(
                group=TORCH + name,
                seq=entry["collective_seq_id"],
                op=entry["profiling_name"].partition(":")[2],
                shapes=entry.get("input_sizes", []),
                dtype=", ".join(entry.get("input_dtypes", [])).lower(),
                start=entry["time_created_ns"] / 1e9,
                at=[_place(frame) for frame in entry.get("frames", [])[:3]],
            )
        )
    found = []
    for number, counts in trace.get("pg_status", {}).items():
        if number not in names:
            continue
        newest = tuple(calls.get(number, [])[-NEWEST:])
        found.append(TorchGroup(names[number], *_counts(counts), newest))
    return found


def _counts(status: dict[str, Any]) -> tuple[int, int]:
    """(enqueued, completed)"""
    return int(status["last_enqueued_collective"]), int(status["last_completed_collective"])


def _place(frame: dict[str, Any]) -> str:
    return f"{frame['filename']}:{frame['line']} {frame['name']}"
