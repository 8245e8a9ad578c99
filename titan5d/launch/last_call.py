"""The last collective of a rank, in memory that outlives its process: for ranks that are killed or abort in C++.

A page of a file in the folder of records is mapped into memory. Writing it at every call is a copy of a few bytes, and
what was written is there for other processes whatever becomes of this one. So a rank that gloo aborts, since another
sent it a different size, can still be compared with that other.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

from titan5d.launch.record import CallRecord

SIZE = 512
"""Bytes; longer calls lose their last shapes."""
SCALAR = "-"
"""The shape of a number; nothing at all is no tensor."""


class LastCall:
    """The page of one rank."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), SIZE)

    def write(
        self, group: str, seq: int, op: str, peer: int | None, shapes: str, dtype: str, start: float
    ) -> None:
        """`peer`: global rank; `shapes` as in "4,8 16 -": of several tensors."""
        who = "" if peer is None else peer
        text = f"{group}|{seq}|{op}|{who}|{dtype}|{start:.3f}|{shapes}|".encode()[: SIZE - 1] + b"\0"
        self._page[: len(text)] = text

    def close(self) -> None:
        self._page.close()


def read_last_calls(folder: Path, prefix: str) -> dict[int, CallRecord]:
    """Rank -> its last call, of the ranks that made one."""
    found = {}
    for file in sorted(folder.glob(f"{prefix}*.last")):
        rank = file.stem.removeprefix(prefix)
        parts = file.read_bytes().partition(b"\0")[0].decode(errors="replace").split("|")
        if not rank.isdigit() or len(parts) < 7:
            continue
        group, seq, op, peer, dtype, start, shapes = parts[:7]
        with suppress(ValueError):  # half written by a process that died in it
            found[int(rank)] = CallRecord(
                group,
                int(seq),
                op,
                peer=int(peer) if peer else None,
                shapes=[_shape(text) for text in shapes.split(" ")] if shapes else [],
                dtype=dtype,
                start=float(start),
                state="last",
            )
    return found


def _shape(text: str) -> list[int]:
    return [] if text == SCALAR else [int(n) for n in text.split(",") if n]
