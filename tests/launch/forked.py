"""Forks ranks that may hang, die or be stopped, and tells how each of them ended."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ended:
    """Exit status of one rank (negative: a signal; None: it had not ended), and what it wrote to stderr."""

    status: int | None
    stderr: str


def fork_ranks(
    body: Callable[[int], None],
    world: int,
    folder: Path,
    seconds: float,
    meanwhile: Callable[[list[int]], None] | None = None,
) -> list[Ended]:
    """Runs `body(rank)` on forked gloo ranks and waits for all of them to end by themselves, at most `seconds`.

    `meanwhile` gets their process ids. No process outlives the call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pids = [os.fork() or _rank(body, rank, world, folder) for rank in range(world)]
    statuses: dict[int, int] = {}
    try:
        if meanwhile is not None:
            meanwhile(pids)
        deadline = time.monotonic() + seconds
        while len(statuses) < world and time.monotonic() < deadline:
            for pid in pids:
                if pid not in statuses:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        statuses[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
    finally:
        for pid in pids:
            if pid not in statuses:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return [
        Ended(statuses.get(pid), (folder / f"stderr-{rank}").read_text()) for rank, pid in enumerate(pids)
    ]


def _rank(body: Callable[[int], None], rank: int, world: int, folder: Path) -> int:
    """One rank's life; it never returns."""
    status = 1
    try:
        stderr = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stderr, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
        )
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        body(rank)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
