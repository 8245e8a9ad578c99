"""What a pipeline rank holds at the actions of its table: activations of micro-batches, and gradients of stages.

    F   activations on                       I   activations off, what W needs on
    B   activations off, gradients on        W   what W needs off, weight gradients on, which wait

W makes weight gradients outside of a backward, in the type computed with. FSDP2 adds them to those of earlier
micro-batches, in the reduce type, at the end of the stage's next backward; until then both are there. A stage has no
gradients before its first backward, so a pipe that is filled once has none when its activations are most.

The fullest action is not the one with most activations when what comes on top of them differs: a backward has a block's
gradients, the last stage the logits. So there is a maximum for each of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import ge, mul
from typing import NamedTuple

from titan5d.schedules.table import Schedule


class Held(NamedTuple):
    """Bytes at one action: activations of all micro-batches in flight, and gradients of all stages."""

    activations: float
    gradients: float


class StageBytes(NamedTuple):
    """Bytes of one stage.

    Attributes:
        activation: of a micro-batch, from F to the end of B or I.
        kept_for_weights: of a micro-batch, between I and the end of W.
        gradients: as they are added up. put_off: the part of them that W makes.
        waiting: what W made, until it is added up; 0 where it is added at once.
    """

    activation: float
    kept_for_weights: float
    gradients: float
    put_off: float
    waiting: float


class FullestActions(NamedTuple):
    """Of one rank, each at the fullest action of its kind; None where the rank has none of it.

    Attributes:
        forward: at the end of an F.
        whole, input: at the start of a B, of an I.
        head: in the last stage, from F to its backward.
    """

    forward: Held | None
    whole: Held | None
    input: Held | None
    head: Held | None

    def is_within(self, other: FullestActions) -> bool:
        """Whether `other` has the same kinds of actions, and holds as much or more at each."""
        return all(
            one is other_one is None
            or (
                one is not None
                and other_one is not None
                and one.activations <= other_one.activations
                and one.gradients <= other_one.gradients
            )
            for one, other_one in zip(self, other, strict=True)
        )


State = tuple[int, ...]
"""What a rank holds at an action, whatever its bytes are. Of each of its stages: micro-batches with all activations,
micro-batches of which W still needs some; then of each stage whether there are gradients of its own (1 or 0), those
that W made and that are added up, and those that wait."""


class RankStates(NamedTuple):
    """Of one rank, the states among which the fullest is, whatever the bytes: those that hold no less than another.

    Attributes:
        stages: that the rank holds. at: by the kind of an action, or `head`.
    """

    stages: tuple[int, ...]
    at: dict[str, tuple[State, ...]]


def fullest_actions(schedule: Schedule, stages: Sequence[StageBytes]) -> tuple[FullestActions, ...]:
    """Every rank's, of a table whose stages have these sizes."""
    return fullest_of(table_states(schedule, tuple(stage.waiting > 0 for stage in stages)), stages)


def table_states(schedule: Schedule, waits: Sequence[bool]) -> tuple[RankStates, ...]:
    """Every rank's states. They need the table played once for all sizes.

    Args:
        waits: of each stage whether gradients that W made wait, as opposed to being added up at once.
    """
    return tuple(_states_of_rank(schedule, rank, waits) for rank in range(schedule.n_ranks))


def fullest_of(states: Sequence[RankStates], stages: Sequence[StageBytes]) -> tuple[FullestActions, ...]:
    """Every rank's fullest actions when the stages have these sizes."""
    found = []
    for rank in states:
        mine = [stages[stage] for stage in rank.stages]
        activations = [size for one in mine for size in (one.activation, one.kept_for_weights)]
        gradients = [size for one in mine for size in (one.gradients - one.put_off, one.put_off, one.waiting)]
        best = {kind: _fullest(at, activations, gradients) for kind, at in rank.at.items()}
        found.append(FullestActions(best.get("F"), best.get("B"), best.get("I"), best.get("head")))
    return tuple(found)


def _fullest(states: Sequence[State], activations: list[float], gradients: list[float]) -> Held:
    sizes = [*activations, *gradients]
    state = states[0] if len(states) == 1 else max(states, key=lambda one: sum(map(mul, one, sizes)))
    rest = state[len(activations) :]
    return Held(sum(map(mul, state, activations)), sum(map(mul, rest, gradients)))


def _states_of_rank(schedule: Schedule, rank: int, waits: Sequence[bool]) -> RankStates:
    last_stage, stages = schedule.n_stages - 1, schedule.stages_of_rank(rank)
    split = 2 * len(stages)
    place = {stage: index for index, stage in enumerate(stages)}
    now = [0] * 5 * len(stages)
    seen: dict[str, dict[State, None]] = {}  # in order
    for stage, kind, _ in schedule.actions(rank):
        whole = 2 * place[stage]  # then: kept for W
        own = split + 3 * place[stage]  # then: put off, waiting
        if kind == "W":
            now[whole + 1] -= 1
            if waits[stage]:
                now[own + 2] = 1
            else:
                now[own] = now[own + 1] = 1
            continue
        if kind == "F":
            now[whole] += 1
        state = tuple(now)
        seen.setdefault(kind, {})[state] = None
        if stage == last_stage:
            seen.setdefault("head", {})[state] = None
        if kind == "F":
            continue
        now[whole] -= 1
        if kind == "I":
            now[whole + 1] += 1
        now[own] = 1
        if kind == "B" or now[own + 2]:
            now[own + 1] = 1
        now[own + 2] = 0
    return RankStates(stages, {kind: _not_below_another(list(states)) for kind, states in seen.items()})


def _not_below_another(states: list[State]) -> tuple[State, ...]:
    """Those of which no other holds as much or more of everything."""
    kept: list[State] = []
    for state in sorted(states, key=sum, reverse=True):
        for other in kept:
            if all(map(ge, other, state)):
                break
        else:
            kept.append(state)
    return tuple(state for state in states if state in kept)
