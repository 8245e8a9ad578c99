"""Schedules whose stages go round the ranks: GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble.

Each builder writes, for every rank, the order of its actions. p = ranks, v = chunks (stages) per rank,
m = micro-batches; stage s is on rank s % p. F, I and W are the times of one micro-batch in all of a rank's
stages, B = I + W. Any m >= 1 works; the bubbles given are those of m >= p. The numbers are checked in
`catalog.build`.
"""

from __future__ import annotations

from titan5d.schedules.table import Action, Kind, Schedule, Slot, loop_placement


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    Bubble (p - 1)(F + B). Holds the activations of all m micro-batches.
    """
    rows = []
    for rank in range(p):
        rows.append(_all(rank, "F", m) + _all(rank, "B", m))
    return _loop_schedule("GPipe", p, 1, m, rows)


def one_f_one_b(p: int, m: int) -> Schedule:
    """One forward, one backward, as soon as the first backward can be there (Narayanan et al. 2021,
    arXiv 2104.04473, "PipeDream-Flush").

    Bubble (p - 1)(F + B), as GPipe, but rank r holds at most p - r micro-batches, whatever m is.
    """
    rows = []
    for rank in range(p):
        warmup = min(p - 1 - rank, m)  # the last rank can go backward at once, each one before it a hop later
        forwards, backwards = _all(rank, "F", m), _all(rank, "B", m)
        rows.append(_one_forward_one_backward(forwards, backwards, warmup))
    return _loop_schedule("1F1B", p, 1, m, rows)


def looped_bfs(p: int, v: int, m: int) -> Schedule:
    """Breadth first: every micro-batch through a chunk before the next chunk starts (Lamy-Poirier 2022,
    arXiv 2211.05953).

    Bubble (p - 1)(F + B) / v. Holds all m micro-batches of all its chunks, but works on one stage for m
    actions at a time, so that sharded weights (ZeRO-3) are gathered once per stage and pass.
    """
    rows = []
    for rank in range(p):
        row: list[Slot] = []
        for chunk in range(v):
            row += _all(chunk * p + rank, "F", m)
        for chunk in reversed(range(v)):
            row += _all(chunk * p + rank, "B", m)
        rows.append(row)
    return _loop_schedule("LoopedBFS", p, v, m, rows)


def interleaved_1f1b(p: int, v: int, m: int) -> Schedule:
    """1F1B over v chunks a rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Micro-batches travel in rounds of at least p: a round passes chunk 0 of every rank, then chunk 1, and so
    on, so that its first micro-batch is back at rank 0 when the round's last one has left.

    Bubble (p - 1)(F + B) / v. Rank r holds at most (v - 1) p + 2(p - 1 - r) + 1 chunks' activations when m is
    a multiple of p: 1 + (p - 1)/(pv) of what 1F1B holds. v times as many messages.
    """
    rounds = _rounds(p, m)
    rows = []
    for rank in range(p):
        forwards = _in_rounds(rank, p, v, rounds, "F")
        backwards = _in_rounds(rank, p, v, rounds, "B")
        # The last rank meets the last chunk of the first micro-batch when a whole round has passed each of
        # its other chunks; to every rank before it that moment is one hop forward and one back further.
        warmup = min((v - 1) * rounds[0] + 2 * (p - 1 - rank), len(forwards))
        rows.append(_one_forward_one_backward(forwards, backwards, warmup))
    return _loop_schedule("Interleaved1F1B", p, v, m, rows)


def interleaved_zero_bubble(p: int, v: int, m: int) -> Schedule:
    """Interleaved 1F1B whose backward is split: I at once, W later (Qi et al. 2023, arXiv 2401.10241; with
    v = 1 it is their ZB-H1).

    An input gradient is back sooner than a whole backward would be, so the warm-up needs one forward per hop
    instead of two. Rank r keeps its last r weight gradients in store; in the cool-down, while it waits for
    input gradients from the ranks after it, it works them off.

    Bubble (p - 1)(F + I - W) / v for W <= I, never below (p - 1) F / v. Every rank holds at most v p chunks
    when m is a multiple of p, as much as 1F1B's first rank.
    """
    rounds = _rounds(p, m)
    rows = []
    for rank in range(p):
        forwards = _in_rounds(rank, p, v, rounds, "F")
        input_grads = _in_rounds(rank, p, v, rounds, "I")
        weight_grads = _in_rounds(rank, p, v, rounds, "W")
        warmup = min((v - 1) * rounds[0] + (p - 1 - rank), len(forwards))
        row: list[Slot] = list(forwards[:warmup])
        for index, input_grad in enumerate(input_grads):
            row += forwards[warmup + index : warmup + index + 1]  # none left: the cool-down
            row.append(input_grad)
            if index >= rank:
                row.append(weight_grads[index - rank])
        row += weight_grads[max(0, len(weight_grads) - rank) :]
        rows.append(row)
    return _loop_schedule("InterleavedZeroBubble", p, v, m, rows)


def _all(stage: int, kind: Kind, m: int) -> list[Slot]:
    """One stage, every micro-batch in turn."""
    return [Action(stage, kind, microbatch) for microbatch in range(m)]


def _one_forward_one_backward(forwards: list[Slot], backwards: list[Slot], warmup: int) -> list[Slot]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(forwards) - warmup :]


def _rounds(p: int, m: int) -> list[int]:
    """How many micro-batches travel together, round by round.

    A round shorter than p leaves the pipe partly empty each time it goes round, a longer one only costs
    memory: so as many rounds as hold p each, the left-over micro-batches spread over them, the larger rounds
    first. 10 micro-batches on 4 ranks: 5, 5. Fewer micro-batches than ranks: one short round.
    """
    n_rounds = max(1, m // p)
    return [m // n_rounds + (1 if index < m % n_rounds else 0) for index in range(n_rounds)]


def _in_rounds(rank: int, p: int, v: int, rounds: list[int], kind: Kind) -> list[Slot]:
    """The order in which a rank meets its (chunk, micro-batch) pairs: forward the chunks of a round go up,
    backward they come down."""
    order: list[Slot] = []
    first = 0
    for size in rounds:
        for step in range(v):
            chunk = step if kind == "F" else v - 1 - step
            order += [Action(chunk * p + rank, kind, microbatch) for microbatch in range(first, first + size)]
        first += size
    return order


def _loop_schedule(name: str, p: int, v: int, m: int, rows: list[list[Slot]]) -> Schedule:
    return Schedule(name, m, loop_placement(p, v), tuple(tuple(row) for row in rows))
