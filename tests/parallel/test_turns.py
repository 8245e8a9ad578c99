"""Work in turns: who runs when, how it ends, what a thread takes along."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from titan5d.launch.record import BESIDE
from titan5d.launch.stacks import all_stacks, training_threads
from titan5d.parallel import turns as turns_module
from titan5d.parallel.turns import THREAD, Turns


class Steps:
    """Work that says its name `turns` times, with a pause after each but the last."""

    def __init__(self, turns: Turns, said: list[str], name: str, count: int) -> None:
        self.turns, self.said, self.name, self.count = turns, said, name, count

    def __call__(self) -> None:
        for number in range(self.count):
            self.said.append(self.name)
            if number < self.count - 1:
                self.turns.pause()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (3, 3, "ababab"),
        (1, 3, "abbb"),
        (3, 1, "abaa"),
        (4, 2, "ababaa"),
        (1, 1, "ab"),
        (0, 2, "bb"),
        (2, 0, "aa"),
    ],
)
def test_strictly_in_turns_until_one_has_ended(first: int, second: int, expected: str) -> None:
    turns, said = Turns(), list[str]()
    for _ in range(2):  # as good as new afterwards
        said.clear()
        turns.run(Steps(turns, said, "a", first), Steps(turns, said, "b", second))
        assert "".join(said) == expected
    assert THREAD not in {thread.name for thread in threading.enumerate()}


def test_never_two_at_once() -> None:
    turns, running = Turns(), list[int]()

    def work() -> None:
        for _ in range(20):
            running.append(1)
            assert len(running) == 1
            time.sleep(0.001)
            running.pop()
            turns.pause()

    turns.run(work, work)


def test_a_pause_of_work_that_is_alone_does_nothing() -> None:
    turns = Turns()
    turns.pause()
    turns.run(lambda: None, lambda: None)
    turns.pause()


def in_autograd(pause: Callable[[], None]) -> None:
    """Pauses in a forward and in a backward pass."""

    class Pausing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            pause()
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            pause()
            return grad * 2

    x = torch.ones(3, requires_grad=True)
    Pausing.apply(Pausing.apply(x)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4.0] * 3


def test_pauses_inside_autograd() -> None:
    turns, said = Turns(), list[str]()

    def pausing(name: str) -> Callable[[], None]:
        def pause() -> None:
            said.append(name)
            turns.pause()

        return partial(in_autograd, pause)

    turns.run(pausing("a"), pausing("b"))
    assert "".join(said) == "abababab"


# Errors


def fails() -> None:
    raise ArithmeticError("a number went missing")


@pytest.mark.parametrize("failing", ["first", "second"])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("autograd", [False, True])
def test_an_error_in_one_ends_the_other_and_comes_out_as_it_was(
    failing: str, after: int, autograd: bool
) -> None:
    turns, ended, went_on = Turns(), list[str](), list[str]()

    def bad() -> None:
        for _ in range(after):
            turns.pause()
        fails()

    def good() -> None:
        try:
            if autograd:
                in_autograd(turns.pause)
            while True:
                turns.pause()
                went_on.append("a turn")
        finally:
            ended.append("good")

    with pytest.raises(ArithmeticError, match="a number went missing") as caught:
        turns.run(*((bad, good) if failing == "first" else (good, bad)))
    assert "fails" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert caught.value.__context__ is None
    started = failing == "second" or after > 0
    assert ended == ["good"] * started and len(went_on) <= after
    turns.run(lambda: None, lambda: None)


def test_an_error_after_the_other_has_ended() -> None:
    turns = Turns()
    for order in ((fails, lambda: None), (lambda: None, fails)):
        with pytest.raises(ArithmeticError):
            turns.run(*order)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever runs the tests in the background has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("waiting", [False, True], ids=["in its own turn", "in the other's"])
def test_an_interrupt_ends_both(waiting: bool) -> None:
    """SIGINT reaches the main thread, whoever has the turn."""
    turns, ended = Turns(), list[str]()

    def interrupted() -> None:
        if not waiting:
            turns.pause()
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            turns.pause()

    def other() -> None:
        try:
            if waiting:
                os.kill(os.getpid(), signal.SIGINT)  # handled by the main thread, which waits for its turn
                time.sleep(0.2)
            while True:
                turns.pause()
        finally:
            ended.append("other")

    with pytest.raises(KeyboardInterrupt):
        turns.run(interrupted, other)
    assert ended == ["other"]


@pytest.mark.usefixtures("interruptible")
def test_who_never_pauses_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time: the signal may also come before the first waits, when it does not end the wait (1 in 5 here)."""
    monkeypatch.setattr(turns_module, "LEAVE", 0.05)
    monkeypatch.setattr(turns_module, "LISTEN", 0.05)
    turns = Turns()

    def stuck(goes_on: threading.Event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        goes_on.wait(20)

    for _ in range(20):
        goes_on, interrupted = threading.Event(), time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            turns.run(turns.pause, partial(stuck, goes_on))
        assert time.monotonic() - interrupted < 5
        goes_on.set()


def test_an_error_leaves_no_circle() -> None:
    class Kept:
        pass

    turns, alive = Turns(), list[weakref.ref[Kept]]()

    def work() -> None:
        kept = Kept()
        alive.append(weakref.ref(kept))
        turns.pause()
        fails()

    gc.disable()
    try:
        with pytest.raises(ArithmeticError):
            turns.run(work, turns.pause)
        assert alive[0]() is None
    finally:
        gc.enable()


# What goes with it


def test_contexts_are_around_each_turn() -> None:
    turns, said = Turns(), list[str]()

    def around(name: str) -> Any:
        @contextmanager
        def context() -> Iterator[None]:
            said.append(f"<{name}")
            yield
            said.append(f"{name}>")

        return context

    work = Steps(turns, said, "a", 2), Steps(turns, said, "b", 3)
    turns.run(*work, around=(around("a"), around("b")))
    assert " ".join(said) == "<a a a> <b b b> <a a a> <b b b b>"
    said.clear()
    with pytest.raises(ArithmeticError):
        turns.run(turns.pause, fails, around=(around("a"), around("b")))
    assert " ".join(said) == "<a a> <b b>"


def test_settings_of_the_thread_come_along() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    variable.set("mine")
    found: list[Any] = []

    def look() -> None:
        found.append((torch.is_grad_enabled(), torch.get_num_threads(), variable.get()))

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                Turns().run(look, look)
    finally:
        torch.set_num_threads(threads)
    assert found == [(True, 3, "mine")] * 2 + [(False, 3, "mine")] * 2


@pytest.mark.parametrize(
    "mode",
    [
        lambda: FlopCounterMode(display=False),
        lambda: torch.device("cpu"),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["dispatch", "function", "autocast"],
)
def test_one_after_the_other_where_a_mode_is_in_force(mode: Callable[[], Any]) -> None:
    turns, said, threads = Turns(), list[str](), set[str]()

    def named(work: Steps) -> Callable[[], None]:
        def run() -> None:
            threads.add(threading.current_thread().name)
            work()

        return run

    with mode():
        turns.run(named(Steps(turns, said, "a", 3)), named(Steps(turns, said, "b", 3)))
    assert "".join(said) == "aaabbb" and threads == {threading.current_thread().name}


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_modes_of_the_work_are_its_own() -> None:
    """They end in another order than they began in, and nobody takes the one of the other for theirs."""
    turns, modes, flags = Turns(), (Seen(), Seen()), list[bool]()

    def first() -> None:
        with modes[0]:
            torch.ones(1).neg()
            turns.pause()
            torch.ones(1).exp()
        turns.pause()
        flags.append(is_in_torch_dispatch_mode())

    def second() -> None:
        flags.append(is_in_torch_dispatch_mode())
        with modes[1]:
            torch.ones(1).sin()
            turns.pause()
            torch.ones(1).cos()

    turns.run(first, second)
    assert flags == [False, False] and not is_in_torch_dispatch_mode()
    assert [[name for name in mode.operators if "ones" not in name] for mode in modes] == [
        ["neg.default", "exp.default"],
        ["sin.default", "cos.default"],
    ]


def test_both_stacks_can_be_read() -> None:
    turns, stacks, threads = Turns(), dict[str, list[str]](), list[str]()

    def stands_here() -> None:
        stacks.update(all_stacks())
        threads.extend(thread.name for thread in training_threads())

    def waits_there() -> None:
        turns.pause()

    turns.run(waits_there, stands_here)
    assert any(place.endswith(" stands_here") for place in stacks[THREAD])
    assert any(place.endswith(" waits_there") for place in stacks["MainThread"])
    assert threads == ["MainThread", BESIDE]
