"""Worker processes of a build: each asks for a piece, encodes it, asks for the next.

    parent  --(index, piece)-->  worker        one pipe each; None ends it
    parent  <--("progress", n) ("done", index) ("failed", message)--

Processes are spawned, not forked, so the caller may hold threads, CUDA or process groups. A worker whose parent
is gone finds its pipe closed and ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from titan5d.data.corpus import Piece
from titan5d.data.encode import ShardJob, encode_piece
from titan5d.data.errors import DataError

SILENCE_LIMIT_S = 600.0  # a batch takes a fraction of a second


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_pieces(
    job: ShardJob, todo: list[tuple[int, Piece]], workers: int, on_chars: Callable[[int], None]
) -> None:
    """Encodes all of `todo` on `workers` processes; `on_chars(n)` hears of every n characters done.

    Raises DataError with the message of the first worker that failed, died, or said nothing for 10 minutes;
    the others are ended. Shards finished by then stay.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[Connection, BaseProcess] = {}
    left = iter(todo)
    try:
        for _ in range(min(workers, len(todo))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            pipes[ours] = process
            ours.send(next(left))
        busy = set(pipes)
        while busy:
            ready = wait(list(busy), timeout=SILENCE_LIMIT_S)
            if not ready:
                raise DataError(
                    f"data build: no worker said anything for {SILENCE_LIMIT_S:g} s; "
                    "is the disk or network drive stuck?"
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                if not _hear(pipe, pipes[pipe], left, on_chars):
                    busy.discard(pipe)
    finally:
        for pipe, worker in pipes.items():
            pipe.close()
            worker.terminate()
            worker.join(timeout=10)


def _hear(
    pipe: Connection, process: BaseProcess, left: Iterator[tuple[int, Piece]], on_chars: Callable[[int], None]
) -> bool:
    """Takes one message of a worker and hands out the next piece. False once there is no more for it to do."""
    try:
        kind, value = pipe.recv()
        if kind == "done":
            following = next(left, None)
            pipe.send(following)
            return following is not None
    except (EOFError, OSError):
        process.join(timeout=10)
        raise DataError(
            f"data build: a worker ended with exit status {process.exitcode} (a negative one is a signal; -9 is often "
            "lack of memory: try fewer workers). Finished shards are kept; run it again to continue"
        ) from None
    if kind == "failed":
        raise DataError(value)
    on_chars(value)
    return True


def _work(pipe: Connection, job: ShardJob) -> None:
    """The life of one worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker; read by the tokenizers library
    try:
        while (task := pipe.recv()) is not None:
            index, piece = task
            for chars in encode_piece(job, index, piece):
                pipe.send(("progress", chars))
            pipe.send(("done", index))
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except DataError as error:
        _tell(pipe, ("failed", str(error)))
    except OSError as error:
        _tell(pipe, ("failed", f"data build: writing to {job.folder} failed: {error}"))
    except Exception as error:
        _tell(pipe, ("failed", f"data build: {type(error).__name__}: {error}"))


def _tell(pipe: Connection, message: tuple[str, Any]) -> None:
    try:
        pipe.send(message)
    except OSError:  # nobody is left to hear it
        pass
