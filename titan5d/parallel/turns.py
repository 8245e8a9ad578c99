"""Two pieces of work that take turns: while what one sent is under way, the other computes.

    first    [compute, send] .  .  .  .  . [compute, send] .  .  .  .  . [compute]         [ ] a turn
    second                  [compute, send] .  .  .  .  . [compute, send]         [to its end]
    network                  <- of first ->  <- of second -> <- of first ->

Each runs in a thread of its own, since both are deep inside calls that they must come back to: a forward pass, and a
backward pass inside autograd. But never do two run at once. A turn ends at a `pause`, and nowhere else, so the order
of everything that happens is that of the program, the same on every rank whose work pauses at the same places: which
is what collectives need.

What torch keeps by thread comes along: the CUDA stream, whether gradients are recorded, how many threads a product
takes, context variables. Modes (of dispatch and of functions, autocast) cannot: where one is in force, the two run one
after the other in the thread it is in force in. Modes that the work itself enters are taken off for the time of a
pause, since torch notes in variables of all threads that there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

THREAD = "second of two in turns"
"""The name of the thread that is not the caller's."""
LEAVE = 5.0
"""Seconds that the other has to end, once one has failed."""
LISTEN = 0.5
"""Seconds after which a wait looks for an interrupt: a signal just before a wait does not end it."""

Around = Callable[[], AbstractContextManager[Any]]


def no_pause() -> None:
    """A pause of work that is alone."""


class Turns:
    """`run` two pieces of work; whatever they call may call `pause`."""

    def __init__(self) -> None:
        self._pair: _Pair | None = None

    def pause(self) -> None:
        """Ends a turn: returns when the other has paused too, or ended. Returns at once if there is no other (any
        more), or nothing is run. May be called from any thread that works for the one whose turn it is, such as
        autograd's."""
        if self._pair is not None:
            self._pair.pause()

    def run(
        self,
        first: Callable[[], None],
        second: Callable[[], None],
        around: tuple[Around, Around] = (nullcontext, nullcontext),
    ) -> None:
        """Does both, beginning with `first`, which runs in the calling thread. When one has ended the other goes on
        without pauses.

        Args:
            around: for each of them a context that its turns, one by one, run in.

        Raises what the first to fail raised, with its traceback. The other is ended at its next pause; if it does not
        come to one within `LEAVE` seconds it is left behind.

        There is no limit on a turn: it ends because all that a rank waits for (collectives, messages) has one.
        """
        assert self._pair is None, "turns inside turns"
        if _bound_to_this_thread():
            for work, context in zip((first, second), around, strict=True):
                with context():
                    work()
            return
        pair = _Pair(_Work(first, around[0]), _Work(second, around[1]))
        args = (pair.run_second, _settings())
        thread = threading.Thread(target=copy_context().run, args=args, name=THREAD, daemon=True)
        self._pair = pair
        try:
            thread.start()
            pair.do(pair.first)
            while pair.error is None and thread.is_alive():
                thread.join(LISTEN)
            thread.join(LEAVE)
        except (
            BaseException
        ) as error:  # the thread could not start, or an interrupt while the second ended alone
            pair.fail(error, pair.first)
            if thread.ident is not None:
                thread.join(LEAVE)
        finally:
            self._pair = None
        failure, pair.error = pair.error, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it holds this frame: in a circle they would wait for the garbage collector


class _Abandoned(BaseException):
    """Ends work at its pause, since the other has failed. Not an Exception, so that nobody takes it for an error."""


class _Work:
    """One of the two: what it does, and its place to wait."""

    def __init__(self, do: Callable[[], None], around: Around) -> None:
        self.do = do
        self.turn = threading.Semaphore(0)
        self.ended = False
        self._around = around
        self._inside = ExitStack()

    def enter(self) -> None:
        self._inside.enter_context(self._around())

    def leave(self) -> None:
        self._inside.close()


class _Pair:
    """Both of them. `error`: what the first to fail raised."""

    def __init__(self, first: _Work, second: _Work) -> None:
        self.first, self.second = first, second
        self.running = first
        self.error: BaseException | None = None

    def pause(self) -> None:
        if self.error is not None:
            raise _Abandoned
        mine, other = self.running, self._other(self.running)
        if other.ended:
            return
        with _without_modes():
            mine.leave()
            self._give_turn(other)
            while not mine.turn.acquire(timeout=LISTEN):
                pass
        if self.error is not None:
            raise _Abandoned
        mine.enter()

    def do(self, mine: _Work) -> None:
        """All of one's work, of which the first turn is now."""
        try:
            mine.enter()
            mine.do()
        except BaseException as error:
            mine.leave()
            self.fail(error, mine)
        else:
            mine.leave()
            mine.ended = True
            self._give_turn(self._other(mine))

    def run_second(self, settings: AbstractContextManager[None]) -> None:
        """The life of the second thread."""
        with settings:
            self.second.turn.acquire()
            if self.error is None:
                self.do(self.second)

    def fail(self, error: BaseException, mine: _Work) -> None:
        """Ends both. The turn is given even if the other has it: it then does not wait at its next pause."""
        if self.error is None:
            self.error = error
        mine.ended = True
        self._give_turn(self._other(mine))

    def _give_turn(self, to: _Work) -> None:
        self.running = to
        to.turn.release()

    def _other(self, mine: _Work) -> _Work:
        return self.second if mine is self.first else self.first


def _bound_to_this_thread() -> bool:
    autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return autocast or bool(_get_current_dispatch_mode_stack() or _get_current_function_mode_stack())


def _settings() -> AbstractContextManager[None]:
    """What torch keeps for this thread, to be entered in another."""
    gradients, threads = torch.is_grad_enabled(), torch.get_num_threads()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def inside() -> Iterator[None]:
        torch.set_num_threads(threads)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(gradients))
            if stream is not None:
                stack.enter_context(torch.cuda.device(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return inside()


@contextmanager
def _without_modes() -> Iterator[None]:
    """Takes off the modes of this thread, by torch's own methods (a mode's own may count or report)."""
    modes = _get_current_dispatch_mode_stack()
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)
