"""How the exit status of the ranks survives torchrun, which turns every failure of a rank into its own status 1.

    0 all steps done    1 anything else    2 refused    3 stopped by a signal after saving

`run_train.sh` makes a folder and names it in TITAN5D_STATUS_DIR; each rank writes its status there before it leaves;
when torchrun has ended, the statuses of this node's ranks are combined into the one of the script. Under a plain
torchrun there is no folder, and a rank's status is only its own.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 3

FOLDER = "TITAN5D_STATUS_DIR"
"""Environment variable set for the ranks, like torchrun's own RANK and LOCAL_RANK."""

BEGAN = ".began"
"""Suffix of the file, named by process id, that a rank makes when it starts (failure.py) and removes when it leaves."""

PATIENCE = 5.0
"""Seconds a rank that was refused waits for the other ranks of its node to be refused as well."""


def record(status: int) -> int:
    """Call last on a rank, with its status; returns the status to leave the process with.

    Under the script, ranks that agree on a status other than failure leave with 0: torchrun takes any other number
    for a crash and prints a page about it below the message that matters, while the script has the true one already.
    """
    if FOLDER not in os.environ:
        return status
    folder = Path(os.environ[FOLDER])
    # Written under another name first: a reader never sees half a file
    # By local rank: a rank that is started again, perhaps among fewer nodes, takes the place of its earlier self
    part = folder / f"{os.environ.get('LOCAL_RANK', '0')}.part"
    part.write_text(str(status))
    part.rename(part.with_suffix(""))
    (folder / f"{os.getpid()}{BEGAN}").unlink(missing_ok=True)
    if status == STOPPED:  # all ranks agreed to stop before any of them got here
        return DONE
    if status == REFUSED and _all_refused(folder, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        return DONE
    return status


def leave_at_once(code: int = FAILED) -> NoReturn:
    """Ends this process from any thread, noted as failed unless there is no room for the note."""
    with suppress(OSError):
        record(FAILED)
    os._exit(code)


def combine(folder: Path, ranks: int, launcher: int) -> int:
    """The status of a node from its ranks' and from the launcher's own (0 unless a rank failed or died)."""
    statuses = recorded(folder)
    if REFUSED in statuses:
        return REFUSED
    if len(statuses) == ranks and set(statuses) == {STOPPED}:
        return STOPPED
    return DONE if launcher == 0 and set(statuses) <= {DONE} else FAILED


def recorded(folder: Path) -> list[int]:
    """What the ranks of this node have written so far."""
    return [int(file.read_text()) for file in folder.iterdir() if not file.suffix]


def _all_refused(folder: Path, ranks: int) -> bool:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if recorded(folder).count(REFUSED) == ranks:
            return True
        time.sleep(0.05)
    return False
