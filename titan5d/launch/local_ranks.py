"""Forks N CPU ranks from this process, joined by gloo, and collects what each returns.

Importing torch takes seconds and forking takes milliseconds, so a test or `titan5d verify` that needs
four ranks forks them from the process that has torch already: 0.2 s instead of 5 s under torchrun.

    results = run_ranks(fn, 4, arg)      # fn(arg) runs on ranks 0..3; results[r] is what rank r returned

The first rank to fail decides the error: its traceback is raised here and the other ranks are ended.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(RuntimeError):
    """A rank raised, died or did not end in time. `rank` names the first one that did."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs `fn(*args)` on `world_size` forked gloo ranks and returns their results in rank order.

    `fn` sees an initialised default process group (backend gloo, ranks 0..world_size-1) and the usual
    RANK, LOCAL_RANK and WORLD_SIZE variables. What it returns must be picklable; tensors come back on the CPU.

    Raises RankFailed with the traceback of the first rank that failed, or naming the ranks that had not
    ended after `timeout` seconds. No process outlives the call.
    """
    folder = Path(tempfile.mkdtemp(prefix="titan5d-ranks-"))
    children: dict[int, int] = {}  # pid -> rank
    pipes: dict[int, int] = {}  # read end -> rank
    try:
        for rank in range(world_size):
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read_end)
                for other in pipes:
                    os.close(other)
                _child(fn, args, rank, world_size, folder / "store", write_end, timeout)
            os.close(write_end)
            children[pid] = rank
            pipes[read_end] = rank
        return _collect(pipes, world_size, timeout)
    finally:
        _end(children)
        for read_end in pipes:
            os.close(read_end)
        shutil.rmtree(folder, ignore_errors=True)


def _child(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: Path,
    write_end: int,
    timeout: float,
) -> None:
    """The life of one rank. Never returns: it leaves by os._exit so that nothing of the parent runs twice."""
    try:
        # A parent that has used several intra-op threads leaves locks held by threads the fork does not copy:
        # the child must go single-threaded before its first parallel region.
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(LOCAL_WORLD_SIZE=str(world_size))
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        payload: tuple[str, Any] = ("ok", fn(*args))
        data = pickle.dumps(payload)
    except BaseException as error:  # whatever ended this rank, the parent must hear of it
        data = pickle.dumps(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(data)
    # A rank that is done stays until the parent has heard from all and ends it: a slower one may still be connecting.
    time.sleep(timeout)
    os._exit(0)


def _collect(pipes: dict[int, int], world_size: int, timeout: float) -> list[Any]:
    buffers: dict[int, bytearray] = {rank: bytearray() for rank in pipes.values()}
    results: dict[int, Any] = {}
    waiting = dict(pipes)
    deadline = time.monotonic() + timeout
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(waiting.values())
            raise RankFailed(late[0], f"ranks {late} of {world_size} had not ended after {timeout:g} s")
        for read_end in ready:
            chunk = os.read(read_end, 1 << 20)
            rank = waiting[read_end]
            if chunk:
                buffers[rank] += chunk
                continue
            del waiting[read_end]
            if not buffers[rank]:
                raise RankFailed(
                    rank, f"rank {rank} of {world_size} died without a word (a signal or an abort in C++)"
                )
            kind, value = pickle.loads(bytes(buffers[rank]))  # written by our own child
            if kind == "error":
                raise RankFailed(rank, f"rank {rank} of {world_size} failed: {value}")
            results[rank] = value
    return [results[rank] for rank in range(world_size)]


def _end(children: dict[int, int]) -> None:
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(pid, 0)
