"""Reading ahead: same items, errors in their turn, no thread left behind, no wait without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from titan5d.data.errors import DataError
from titan5d.data.prefetch import read_ahead


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "titan5d data"]


def counted(n: int, made: list[int]) -> Iterator[int]:
    for i in range(n):
        made.append(i)
        yield i


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_come_in_order_and_the_thread_ends(depth: int) -> None:
    assert list(read_ahead(counted(20, []), depth, 10)) == list(range(20))
    assert threads() == []


def test_no_more_than_depth_is_made_in_advance() -> None:
    made: list[int] = []
    items = read_ahead(counted(100, made), 2, 10)
    assert next(items) == 0
    time.sleep(0.3)
    assert len(made) == 4  # one handed out, two ready, one waiting for a place
    items.close()
    assert threads() == []


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_after_the_items_before_it(depth: int) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("in the reader")

    items = read_ahead(broken(), depth, 10)
    assert next(items) == 1
    with pytest.raises(KeyError, match="in the reader"):
        next(items)
    assert threads() == []


def test_dropping_the_items_ends_the_thread() -> None:
    items = read_ahead(counted(100, []), 2, 10)
    next(items)
    assert len(threads()) == 1
    del items
    assert threads() == []


def test_waiting_has_a_limit() -> None:
    release = threading.Event()

    def stuck() -> Iterator[int]:
        release.wait(20)
        yield 1

    items = read_ahead(stuck(), 2, 0.2)
    start = time.monotonic()
    threading.Timer(0.5, release.set).start()
    with pytest.raises(DataError, match=r"no batch within 0\.2 s"):
        next(items)
    assert time.monotonic() - start < 5
    assert threads() == []
