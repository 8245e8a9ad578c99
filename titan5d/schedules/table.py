"""What a pipeline schedule is: a table that says, for each rank, which action comes after which.

        rank 0 | 0F0 0F1 0F2 . . . 0B0 ...        0F1 = stage 0, forward, micro-batch 1
        rank 1 |     1F0 1F1 . 1B0 ...            (the notation of torch.distributed.pipelining)

The same object is drawn, simulated, checked, written to a file and executed. It holds plain Python values and
imports no torch, so a planner can look at a schedule for ranks it does not have.

A *stage* is a run of consecutive layers; stage s sends its output to stage s + 1 and gets its gradient back
from there. A rank holds one or more stages, its *chunks*. There are four kinds of action, each on one
micro-batch in one stage:

    F  forward
    B  the whole backward
    I  the first half of a split backward: the gradient of the stage's input, which stage s - 1 waits for
    W  the second half: the gradients of the stage's weights, which nobody waits for until the optimizer step

Splitting B into I and W is what lets a schedule fill its bubbles: W fits anywhere after its I
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}


class ScheduleError(ValueError):
    """A schedule that cannot run, or numbers no schedule can be built from. `problems` lists every reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Action(NamedTuple):
    """One kind of work on one micro-batch in one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward of two different micro-batches that run side by side in one slot, so that the
    communication of one hides behind the compute of the other. Written `(0F4;7B1)OVERLAP_F_B`."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Slot = Action | Overlap


def parts(slot: Slot) -> tuple[Action, ...]:
    """The actions of a slot: one, or the two of an Overlap."""
    return (slot.forward, slot.backward) if isinstance(slot, Overlap) else (slot,)


@dataclass(frozen=True)
class Schedule:
    """The table. `rows[r]` is what rank r does, in order; a rank starts a slot as soon as the one before it
    is done and its inputs are there, so idle time is not written down (`simulate.time_slots` shows it)."""

    name: str
    microbatches: int
    rank_of_stage: tuple[int, ...]
    rows: tuple[tuple[Slot, ...], ...]
    forward_only: bool = False

    @property
    def n_ranks(self) -> int:
        return len(self.rows)

    @property
    def n_stages(self) -> int:
        return len(self.rank_of_stage)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages `rank` holds, lowest first: its chunks 0, 1, ..."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    @cached_property
    def chunk_of_stage(self) -> tuple[int, ...]:
        """Stage -> which chunk of its rank it is (0 = the rank's lowest stage)."""
        seen = [0] * self.n_ranks
        chunks = []
        for rank in self.rank_of_stage:
            chunks.append(seen[rank])
            seen[rank] += 1
        return tuple(chunks)

    @cached_property
    def most_chunks(self) -> int:
        """The most stages a rank holds."""
        return max(self.chunk_of_stage) + 1

    def actions(self, rank: int) -> Iterator[Action]:
        """Rank's actions in order, an Overlap's forward before its backward."""
        for slot in self.rows[rank]:
            yield from parts(slot)

    def forwards(self) -> Schedule:
        """The same table without its backwards: what a validation pass runs."""
        rows = tuple(tuple(a for a in self.actions(rank) if a.kind == "F") for rank in range(self.n_ranks))
        return Schedule(self.name, self.microbatches, self.rank_of_stage, rows, forward_only=True)


PlainAction = tuple[int, str, int | None, tuple[tuple[int, str, int], ...] | None]


def plain_tuples(schedule: Schedule) -> dict[int, list[PlainAction]]:
    """rank -> [(stage_index, computation_type, microbatch_index, sub_actions)]: the fields of torch's
    pipeline actions as plain values, in the order of its constructor. An Overlap is (-1, "OVERLAP_F_B", None,
    ((stage, "F", microbatch), (stage, "B", microbatch)))."""
    order: dict[int, list[PlainAction]] = {}
    for rank, row in enumerate(schedule.rows):
        order[rank] = [
            (-1, "OVERLAP_F_B", None, (_plain(slot.forward), _plain(slot.backward)))
            if isinstance(slot, Overlap)
            else (*_plain(slot), None)
            for slot in row
        ]
    return order


def _plain(action: Action) -> tuple[int, str, int]:
    return action.stage, action.kind, action.microbatch


def loop_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s % ranks: the micro-batch goes round the ranks `chunks` times.

    2 ranks, 2 chunks: 0 1 0 1. Every hop crosses ranks, the one from the last rank back to the first too.
    """
    return tuple(stage % ranks for stage in range(ranks * chunks))


def v_placement(ranks: int) -> tuple[int, ...]:
    """Rank r holds stages r and 2 * ranks - 1 - r: down the ranks and back up.

    3 ranks: 0 1 2 2 1 0. The turn needs no message, and the loss is computed on rank 0.
    """
    return tuple(range(ranks)) + tuple(reversed(range(ranks)))
