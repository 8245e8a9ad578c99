"""The seven schedules by name: which chunks and micro-batches each takes, where its stages lie, and `build`.

| name                  | chunks v a rank | stages lie | backward                 |
|-----------------------|-----------------|------------|--------------------------|
| GPipe                 | 1               | loop       | whole                    |
| 1F1B                  | 1               | loop       | whole                    |
| LoopedBFS             | 2 or more       | loop       | whole                    |
| Interleaved1F1B       | 2 or more       | loop       | whole                    |
| InterleavedZeroBubble | 1 or more       | loop       | split in I and W         |
| ZBVZeroBubble         | 2               | V          | split in I and W         |
| DualPipeV             | 2               | V          | whole, split at the ends |

Every one takes any number of micro-batches from 1 on. torch's own tables are narrower (1F1B: at least p;
interleaved: a multiple of the number of rounds; DualPipeV: at least 2p); its runtime, which executes any
table, is not.
"""

from __future__ import annotations

from titan5d.schedules import builders, v_shaped
from titan5d.schedules.table import Schedule, ScheduleError, loop_placement, v_placement

NAMES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules with I and W actions: they need a runtime that can put weight gradients off."""


def default_chunks(name: str) -> int:
    """Stages per rank when nobody says how many."""
    return 1 if name in ("GPipe", "1F1B") else 2


def rank_of_stage(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """Which rank holds each stage, before a table is built."""
    return v_placement(ranks) if name in V_SHAPED else loop_placement(ranks, chunks)


def microbatch_problem(name: str, p: int, v: int, m: int) -> str | None:
    """Why schedule `name` cannot run m micro-batches on p ranks of v chunks each, with the numbers and what
    would work; None when it can."""
    if name not in NAMES:
        return f"schedule {name!r} is not known; there are {', '.join(NAMES)}"
    if p < 1:
        return f"{name} on {p} ranks: a pipeline has at least 1 rank"
    if m < 1:
        return f"{name} with {m} micro-batches: at least 1 is needed, and {p} or more to keep {p} ranks busy"
    if v < 1:
        return f"{name} with {v} chunks per rank: a rank holds at least 1"
    if name in ("GPipe", "1F1B") and v != 1:
        several = "LoopedBFS" if name == "GPipe" else "Interleaved1F1B"
        return f"{name} puts 1 chunk on a rank, got {v}; {several} is its form for several"
    if name in ("LoopedBFS", "Interleaved1F1B") and v < 2:
        single = "GPipe" if name == "LoopedBFS" else "1F1B"
        return f"{name} puts 2 or more chunks on a rank, got {v}; {single} is its form for 1"
    if name in V_SHAPED and v != 2:
        return f"{name} puts exactly 2 chunks on a rank, one on each side of the V, got {v}"
    return None


def build(name: str, p: int, v: int, m: int) -> Schedule:
    """The table of schedule `name` for p ranks of v chunks each and m micro-batches. Raises ScheduleError."""
    problem = microbatch_problem(name, p, v, m)
    if problem is not None:
        raise ScheduleError([problem])
    if name == "GPipe":
        return builders.gpipe(p, m)
    if name == "1F1B":
        return builders.one_f_one_b(p, m)
    if name == "LoopedBFS":
        return builders.looped_bfs(p, v, m)
    if name == "Interleaved1F1B":
        return builders.interleaved_1f1b(p, v, m)
    if name == "InterleavedZeroBubble":
        return builders.interleaved_zero_bubble(p, v, m)
    if name == "ZBVZeroBubble":
        return v_shaped.zbv_zero_bubble(p, m)
    return v_shaped.dualpipe_v(p, m)
