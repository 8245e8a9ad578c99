"""Reads ahead on one thread: the next batches are ready while a step computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

from titan5d.data.errors import DataError

T = TypeVar("T")
POLL_S = 0.1


def read_ahead(items: Iterator[T], depth: int, wait_limit_s: float) -> Generator[T]:
    """Yields what `items` yields, at most `depth` of them made in advance on a thread; depth 0 uses no thread.

    An exception of `items` is raised here, in its turn. Closing the generator, or dropping it, ends the thread.
    Raises DataError when an item takes longer than `wait_limit_s`.
    """
    if depth == 0:
        yield from items
        return
    ready: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(kind: str, value: T | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                ready.put((kind, value), timeout=POLL_S)
                return
            except queue.Full:
                pass

    def work() -> None:
        try:
            for item in items:
                put("item", item)
                if stopped.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=work, name="titan5d data", daemon=True)
    thread.start()
    try:
        while True:
            try:
                kind, value = ready.get(timeout=wait_limit_s)
            except queue.Empty:
                raise DataError(
                    f"no batch within {wait_limit_s:g} s: is the disk or network drive stuck?"
                ) from None
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(value, BaseException)
                raise value
            yield value  # type: ignore[misc]  # "item" carries a T
    finally:
        stopped.set()
        thread.join(timeout=5.0)
