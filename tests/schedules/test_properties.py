"""Every schedule for random numbers of ranks, chunks and micro-batches.

The rules are written out here once more, on the simulated times, so that a mistake in the simulator or in the
checker cannot hide one in a builder."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan5d.schedules import catalog
from titan5d.schedules.check import problems
from titan5d.schedules.memory import peak_activations
from titan5d.schedules.simulate import StageTimes, simulate
from titan5d.schedules.table import Schedule, parts

NUMBERS = {"p": st.integers(1, 7), "v": st.integers(1, 4), "m": st.integers(1, 20)}


def build(name: str, p: int, v: int, m: int) -> Schedule:
    if name in ("GPipe", "1F1B"):
        v = 1
    elif name in catalog.V_SHAPED:
        v = 2
    elif name != "InterleavedZeroBubble":
        v = max(v, 2)
    return catalog.build(name, p, v, m)


@pytest.mark.parametrize("name", catalog.NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(**NUMBERS, seed=st.integers(0, 10**6))
def test_every_action_once_and_after_what_it_needs(name: str, p: int, v: int, m: int, seed: int) -> None:
    schedule = build(name, p, v, m)
    assert problems(schedule) == []

    # Each micro-batch passes each stage once per kind, on the rank of that stage.
    last = schedule.n_stages - 1
    count = Counter((rank, action) for rank in range(schedule.n_ranks) for action in schedule.actions(rank))
    assert set(count.values()) == {1}
    done: dict[tuple[int, int], set[str]] = {}
    for rank, action in count:
        assert schedule.rank_of_stage[action.stage] == rank
        done.setdefault((action.stage, action.microbatch), set()).add(action.kind)
    assert len(done) == schedule.n_stages * m
    assert all(kinds in ({"F", "B"}, {"F", "I", "W"}) for kinds in done.values())

    # With any times, every rank does one thing at a time and nothing starts before its inputs are there.
    draw = random.Random(seed)

    def column() -> tuple[float, ...]:
        return tuple(draw.uniform(0.2, 2) for _ in range(schedule.n_stages))

    comm = draw.choice([0.0, 0.3])
    timeline = simulate(schedule, StageTimes(column(), column(), column(), comm, overlap=draw.random()))
    start, end = {}, {}
    for row in timeline.spans:
        assert all(before.end <= after.start for before, after in pairwise(row))
        for span in row:
            for action in parts(span.slot):
                key = (action.kind if action.kind != "B" else "I", action.stage, action.microbatch)
                start[key], end[key] = span.start, span.end

    def hop(a: int, b: int) -> float:
        return 0.0 if schedule.rank_of_stage[a] == schedule.rank_of_stage[b] else comm

    for (kind, stage, microbatch), begins in start.items():
        if kind == "F" and stage > 0:
            assert begins >= end["F", stage - 1, microbatch] + hop(stage - 1, stage)
        if kind == "I":
            assert begins >= end["F", stage, microbatch]
            if stage < last:
                assert begins >= end["I", stage + 1, microbatch] + hop(stage + 1, stage)
        if kind == "W":
            assert begins >= end["I", stage, microbatch]


@pytest.mark.parametrize("name", catalog.NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(**NUMBERS)
def test_memory_bounds(name: str, p: int, v: int, m: int) -> None:
    schedule = build(name, p, v, m)
    v = schedule.n_stages // p
    longest_round = -(-m // max(1, m // p))
    bound = {
        "GPipe": [m] * p,
        "1F1B": [min(m, p - rank) for rank in range(p)],
        "LoopedBFS": [v * m] * p,
        "Interleaved1F1B": [min(v * m, (v - 1) * longest_round + 2 * (p - 1 - r) + 1) for r in range(p)],
        "InterleavedZeroBubble": [min(v * m, (v - 1) * longest_round + p) for _ in range(p)],
        "ZBVZeroBubble": [min(2 * m, 2 * p)] * p,
        "DualPipeV": [min(2 * m, 2 * p + 1)] * p,
    }[name]
    peaks = peak_activations(schedule)
    assert all(peak <= most for peak, most in zip(peaks, bound, strict=True))
    if m >= 2 * p:  # enough to reach it
        assert list(peaks) == bound


@settings(max_examples=30, deadline=None, derandomize=True)
@given(p=st.integers(2, 6), m=st.integers(1, 16))
def test_the_order_that_theory_says(p: int, m: int) -> None:
    """GPipe = 1F1B > interleaved > zero bubble, for enough micro-batches."""
    m += p

    def makespan(name: str) -> float:
        schedule = build(name, p, 2, m)
        return simulate(schedule, StageTimes.even(schedule, 1, 1, 1)).makespan

    assert makespan("GPipe") == pytest.approx(makespan("1F1B"))
    assert makespan("1F1B") > makespan("Interleaved1F1B") > makespan("InterleavedZeroBubble")
    assert makespan("Interleaved1F1B") > makespan("ZBVZeroBubble")
