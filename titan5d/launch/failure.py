"""Who failed first on this node, and why: one sentence below torchrun's report.

    rank raises          notes time and error in the node's status folder (exit_status.py), then leaves
    rank is killed       has begun, and left without a status or a note
    rank loses a peer    its error says so ("Connection closed by peer [10.0.0.2]:43210"): the cause is elsewhere

torchrun calls the first of its own ranks to end the root cause, on every node; where a rank of another node died, that
is a rank which only noticed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from titan5d.launch.exit_status import BEGAN, FOLDER

ALONE = "this node"
"""What the only node is called."""
NOTE = ".failure"
"""Suffix of the file, named by process id, in which a rank leaves word of its error."""

LOST_PEER = re.compile(
    r"connection (was )?(closed|reset)( by (remote )?peer)?|broken pipe|connection refused|connectfullmesh"
    r"|timed out|timeout|remote process exited|failed to recv|recvvalue failed|no route to host|unreachable",
    re.IGNORECASE,
)
"""How gloo, NCCL and torch's store say that the other side is gone or silent."""
PEER = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")
SOURCE = re.compile(r"\[/\S+\.(cc|cpp|h):\d+\] ")
SHOWN = 300
"""Characters of an error that are repeated in the sentence; all of it stands above."""


@dataclass(frozen=True)
class Failure:
    """One rank's end by an error.

    Attributes:
        rank: of the whole run.
        at: seconds since the epoch.
        error: its type and text.
    """

    rank: int
    at: float
    error: str

    @property
    def lost_peer(self) -> bool:
        return LOST_PEER.search(self.error) is not None

    def __str__(self) -> str:
        error = " ".join(SOURCE.sub("", self.error).split())
        error = error if len(error) <= SHOWN else error[:SHOWN] + " ..."
        clock = time.strftime("%H:%M:%S", time.localtime(self.at)) + f".{int(self.at % 1 * 1000):03d}"
        return f"rank {self.rank} at {clock}: {error}"


def begin(environ: Mapping[str, str] = os.environ) -> None:
    """Call first on a rank: what an earlier start of this local rank has recorded does not count any more."""
    if FOLDER not in environ:
        return
    folder = Path(environ[FOLDER])
    (folder / environ.get("LOCAL_RANK", "0")).unlink(missing_ok=True)
    (folder / f"{os.getpid()}{BEGAN}").write_text(environ.get("RANK", "0"))


def note(error: BaseException, environ: Mapping[str, str] = os.environ) -> None:
    """Leaves word of the error that ends this rank."""
    if FOLDER not in environ:
        return
    failure = Failure(int(environ.get("RANK", "0")), time.time(), f"{type(error).__name__}: {error}")
    part = Path(environ[FOLDER]) / f"{os.getpid()}.part"
    with suppress(OSError):  # a full disk must not take the place of the error
        part.write_text(json.dumps(asdict(failure)))
        part.rename(part.with_suffix(NOTE))


def first_failure(folder: Path, node: str, processes: Collection[int]) -> str | None:
    """The sentence about one start of this node's ranks, or None when none of them failed.

    Args:
        node: what to call this node, such as "node 1 of 2 (host b)".
        processes: the ranks' process ids; a run that was started again has had others before.
    """
    failures, silent = [], []
    for pid in processes:
        left_note, began = folder / f"{pid}{NOTE}", folder / f"{pid}{BEGAN}"
        if left_note.exists():
            failures.append(Failure(**json.loads(left_note.read_text())))
        elif began.exists():
            silent.append(int(began.read_text()))
    failures.sort(key=lambda failure: failure.at)
    own = [failure for failure in failures if not failure.lost_peer]
    if own:
        return f"{node}: first to fail was {own[0]}"
    if silent:
        ranks = ", ".join(map(str, sorted(silent)))
        return (
            f"{node}: {'ranks' if len(silent) > 1 else 'rank'} {ranks} died without a word: killed from outside (also"
            " by torchrun after 30 s without an answer, and when memory runs out) or aborted in C++; torchrun's"
            " report above has the signal"
        )
    if failures and node == ALONE:
        return f"{node}: the ranks only lost each other, see above; the first to notice was {failures[0]}"
    if failures:
        named = {address for failure in failures for address in PEER.findall(failure.error)}
        peers = sorted(address for address in named if not _is_ours(address))
        where = f"log of {' and '.join(peers)} says" if peers else "logs of the other nodes say"
        return (
            f"{node}: no rank failed here by itself; a rank elsewhere died or went silent first, and the {where} why."
            f" Noticed by {failures[0]}"
        )
    return None


def _is_ours(address: str) -> bool:
    """Whether an address is this machine's: only those can be bound. A neighbour that lost its peer is no cause."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
