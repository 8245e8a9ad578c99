"""What ranks leave behind that cannot write a record any more: killed, stopped, aborted, or held up inside C++."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from titan5d.launch.heartbeat import Heartbeat, read_heartbeats
from titan5d.launch.last_call import read_last_calls
from titan5d.launch.record import CallRecord
from titan5d.launch.stacks import read_frozen


@dataclass(frozen=True)
class Traces:
    """By rank.

    Attributes:
        beats: the last sign of life.
        calls: the last collective that was called.
        frozen: where Python stood, innermost first, of ranks that were held up or aborted inside C++.
    """

    beats: Mapping[int, Heartbeat] = field(default_factory=dict)
    calls: Mapping[int, CallRecord] = field(default_factory=dict)
    frozen: Mapping[int, list[str]] = field(default_factory=dict)


def read_traces(folder: Path, prefix: str) -> Traces:
    """Of all ranks, those with records too."""
    return Traces(
        read_heartbeats(folder, prefix), read_last_calls(folder, prefix), read_frozen(folder, prefix)
    )
