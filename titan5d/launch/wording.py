"""Ranks, collectives and places in the words of verdicts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from titan5d.launch.record import CallRecord


def rank_list(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"; even strides are runs, too: "ranks 0, 8, .., 56"."""
    given = sorted(ranks)
    if len(given) == 1:
        return f"rank {given[0]}"
    steps = {after - before for before, after in pairwise(given)}
    if len(given) > 4 and len(steps) == 1 and steps != {1}:
        return f"ranks {given[0]}, {given[1]}, .., {given[-1]}"
    runs: list[list[int]] = []
    for rank in given:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return f"ranks {', '.join(parts)}"


def called(call: CallRecord, rank: int) -> str:
    """The call with its number, as `rank` made it: "all_reduce #12", "recv #3 from rank 1"."""
    text = f"{call.op} {numbered(call.seq)}"
    if call.peer is None:
        return text
    if call.op == "send":
        return f"{text} to rank {call.peer}"
    preposition = "from" if call.op in ("recv", "broadcast", "scatter") else "at"
    return f"{text} {preposition} rank {call.peer}"


def sized(call: CallRecord) -> str:
    """ "float32 (4, 8)"."""
    shapes = " ".join(f"({', '.join(map(str, shape))})" if shape else "()" for shape in call.shapes)
    return f"{call.dtype} {shapes}".strip() if call.shapes else "no data"


def waited_for(call: CallRecord, rank: int, axis: str, group_ranks: Iterable[int], seconds: float) -> str:
    """ "all_reduce #12 of tp (ranks 0-3), float32 (4, 8), for 100.2 s"."""
    return f"{called(call, rank)} of {axis} ({rank_list(group_ranks)}), {sized(call)}, for {seconds:.1f} s"


def short_place(place: str) -> str:
    """ "titan5d/train/step.py:40 train_step" of a long path inside this package; others stay whole."""
    _, found, tail = place.rpartition("/titan5d/")
    return f"titan5d/{tail}" if found else place


def when(step: int, phase: str) -> str:
    """ "step 3, phase forward"; without the part that is unknown."""
    return ", ".join(([f"step {step}"] if step else []) + ([f"phase {phase}"] if phase else [])) or "no phase"


def numbered(seq: int) -> str:
    return f"#{seq}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
