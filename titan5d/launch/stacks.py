"""Where the Python of this process stands, thread by thread."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

import torch

from titan5d.launch.record import BESIDE

_FROZEN_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
TORCH_FOLDER = str(Path(torch.__file__).parent)


def training_threads() -> list[threading.Thread]:
    """The main thread and, in a slot in which two micro-batches take turns, the other's."""
    others = [thread for thread in threading.enumerate() if thread.name == BESIDE]
    return [threading.main_thread(), *others]


def all_stacks(
    error: BaseException | None = None, without: threading.Thread | None = None
) -> dict[str, list[str]]:
    """Thread name -> "file:line function", innermost first.

    Args:
        error: takes the place of the main thread's stack: what counts is where it was raised.
        without: the thread that asks.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread is not without}
    stacks = {}
    for ident, frame in sys._current_frames().items():
        if without is None or ident != without.ident:
            stacks[names.get(ident, f"thread {ident}")] = _places(frame)
    if error is not None:
        stacks[threading.main_thread().name] = traceback_places(error)
    return stacks


def traceback_places(error: BaseException) -> list[str]:
    """The frames an error came through, where it was raised first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]


def outermost_cause(error: BaseException) -> str:
    """Where an error was raised; if that is inside torch, the caller of torch."""
    places = traceback_places(error)
    outside = [place for place in places if not place.startswith(TORCH_FOLDER)]
    return (outside or places or [""])[0]


def read_frozen(folder: Path, prefix: str) -> dict[int, list[str]]:
    """Rank -> where its main thread stood, innermost first, for ranks whose interpreter was held up: written by
    faulthandler, which needs none, into `<prefix>N.frozen`."""
    found = {}
    for file in folder.glob(f"{prefix}*.frozen"):
        rank = file.stem.removeprefix(prefix)
        text = file.read_text(encoding="utf-8", errors="replace")
        threads = []
        for block in re.split(r"\n(?=Thread |Current thread )", text):
            frames = [match.groups() for line in block.splitlines() if (match := _FROZEN_FRAME.match(line))]
            if frames:
                threads.append([f"{name}:{line} {function}" for name, line, function in frames])
        if rank.isdigit() and threads:
            found[int(rank)] = threads[-1]  # the main thread, the oldest, comes last
    return found


def _places(frame: FrameType | None) -> list[str]:
    places = []
    while frame is not None:
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return places
