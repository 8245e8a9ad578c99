"""Signs of life of each rank, in a file of its own: what is known of a rank that can say nothing any more.

A stopped, killed or unplugged process leaves no record of where it stood; its last heartbeat does. Readers on the same
host look at the process itself as well.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from titan5d.launch.record import write_whole


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life.

    Attributes:
        at: when, in seconds since the epoch.
        step, phase: where the rank was.
        waits: whether its main thread stood still for a collective.
    """

    rank: int
    host: str
    pid: int
    at: float
    step: int
    phase: str
    waits: bool

    def write(self, folder: Path, prefix: str) -> None:
        write_whole(folder / f"{prefix}{self.rank}.beat", json.dumps(asdict(self)))


def read_heartbeats(folder: Path, prefix: str) -> dict[int, Heartbeat]:
    """Rank -> its last sign of life."""
    found = {}
    for file in sorted(folder.glob(f"{prefix}*.beat")):
        try:
            beat = Heartbeat(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # gone meanwhile, or half of it lost with its machine
            continue
        found[beat.rank] = beat
    return found


def process_state(beat: Heartbeat) -> str:
    """What has become of a rank's process, in words; seen from its own host only."""
    if beat.host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return f"its host {beat.host} or its process there is gone, stopped or cut off"
    process = f"its process {beat.pid} on {beat.host}"
    try:
        # "pid (name) state parent ...", and a name may hold spaces and brackets
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        state = "gone"
    if state in ("T", "t"):
        return f"{process} is stopped (SIGSTOP or a debugger)"
    if state in ("Z", "X", "x", "gone"):
        return f"{process} is dead: killed from outside (also when memory runs out) or aborted in C++"
    if state == "D":
        return f"{process} is stuck in the kernel (a disk or a driver that does not answer)"
    return f"{process} lives but did not answer (Python held up inside C++, or no time to run)"
