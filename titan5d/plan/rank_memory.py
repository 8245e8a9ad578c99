"""Memory of one pipeline rank by line, at the fullest of the moments of a step (step_moments.py).

Over several micro-batches gradients of the earlier ones are there all the time. In a pipeline the micro-batches in
flight are counted in the very table that is executed (schedules/memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from titan5d.plan.activations import kept_by_layer, weight_gradient_bytes
from titan5d.plan.assumptions import Assumptions
from titan5d.plan.case import Case
from titan5d.plan.memory import REDUCE_BYTES, StateBytes, state_bytes
from titan5d.plan.optimizer_state import optimizer_state_bytes
from titan5d.plan.parts import (
    RankParts,
    all_elements,
    block_elements,
    end_elements,
    put_off_elements,
    rank_parts,
)
from titan5d.plan.step_moments import pipeline_buffers, step_moments
from titan5d.plan.table_moments import FullestActions, Held, StageBytes, fullest_actions
from titan5d.schedules.memory import peak_microbatches
from titan5d.schedules.table import Schedule

Replay = Callable[[Schedule, Sequence[StageBytes]], tuple[tuple[FullestActions, ...], tuple[float, ...]]]
"""Of a table what every rank holds at its fullest actions, and how many micro-batches."""

LINES = (
    "weights",
    "moments",
    "gradients",
    "gathered weights",
    "gather and reduce buffers",
    "activations",
    "recomputed block",
    "block gradients",
    "logits and loss",
    "context buffers",
    "expert buffers",
    "pipeline buffers",
    "fragmentation",
    "device context",
)
"""The lines of the table, in its order."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank.

    Attributes:
        rank: its place in the pipeline; kind: a word for it.
        in_flight: micro-batches whose activations it holds at its fullest moment.
        moment: which one that is.
        lines: bytes by line at that moment.
    """

    rank: int
    kind: str
    in_flight: float
    moment: str
    lines: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.lines.values())

    @property
    def reserved(self) -> float:
        """What torch's allocator reports: all but the device's context."""
        return self.total - self.lines["device context"]


def pipeline_memory(
    case: Case,
    assumptions: Assumptions,
    parts: Sequence[RankParts] | None = None,
    replay: Replay | None = None,
) -> tuple[RankMemory, ...]:
    """Every pipeline rank.

    Args:
        parts: of every rank, where they are known already. replay: `play`, or what remembers; None = `play`.
    """
    if parts is None:
        parts = [rank_parts(case, rank) for rank in range(case.n_ranks)]
    kept, in_flight = _in_flight(case, assumptions, replay or play)
    found: list[RankMemory] = []
    same: dict[tuple[RankParts, FullestActions, bool], RankMemory] = {}
    for rank in range(case.n_ranks):
        key = (parts[rank], kept[rank], _has_head(case, rank))
        if key not in same:
            same[key] = _rank_memory(case, assumptions, rank, parts[rank], kept[rank])
        found.append(replace(same[key], rank=rank, kind=_kind(case, rank), in_flight=in_flight[rank]))
    return tuple(found)


def most_memory(
    case: Case, assumptions: Assumptions, parts: Sequence[RankParts], replay: Replay, too_much: float
) -> float:
    """Bytes of the fullest rank of `pipeline_memory`; or those of the first that is found to need more than `too_much`.

    Of ranks with the same parts only those are computed that another one does not exceed at every fullest action.
    """
    kept, _ = _in_flight(case, assumptions, replay)
    alike: dict[tuple[RankParts, bool], list[int]] = {}
    for rank in range(case.n_ranks):
        alike.setdefault((parts[rank], _has_head(case, rank)), []).append(rank)
    most = 0.0
    for ranks in alike.values():
        computed: list[FullestActions] = []
        for rank in sorted(ranks, key=lambda one: _size(kept[one]), reverse=True):
            if not any(kept[rank].is_within(other) for other in computed):
                computed.append(kept[rank])
                most = max(most, _rank_memory(case, assumptions, rank, parts[rank], kept[rank]).total)
                if most > too_much:
                    return most
    return most


def _size(kept: FullestActions) -> float:
    return sum(sum(held) for held in kept if held is not None)


def kinds(ranks: tuple[RankMemory, ...]) -> list[RankMemory]:
    """One rank of each kind: the first and the last stage and the fullest between them."""
    between = max(ranks[1:-1], key=lambda one: one.total, default=None)
    chosen = [ranks[0], between, ranks[-1]] if len(ranks) > 1 else [ranks[0]]
    return [one for one in chosen if one is not None]


def fullest(ranks: tuple[RankMemory, ...]) -> RankMemory:
    """The rank that decides whether the run fits."""
    return max(ranks, key=lambda one: one.total)


def rank_state(case: Case, parts: RankParts, rank: int) -> StateBytes:
    """Training state of a pipeline rank with these parts, experts that are cut and routers included."""
    topology = case.topology
    state = state_bytes(
        int(parts.shared),
        int(parts.largest),
        case.zero_stage,
        case.shards,
        case.stored,
        case.element,
        case.optimizer,
        case.whole_gradients,
        case.working_copy,
        case.topology.dp * case.topology.cp > 1,
    )
    if parts.experts:
        experts = state_bytes(
            int(sum(parts.experts)),
            int(max(parts.experts)),
            case.zero_stage,
            topology.efsdp,
            case.stored,
            case.element,
            case.optimizer,
            case.whole_gradients,
            (case.zero_stage > 0 and topology.efsdp > 1)
            or (case.stored != case.element and not case.rounds_layers),
            topology.dp_replicate * topology.efsdp > 1,
        )
        state += replace(experts, buffers=0.0) if case.rounds_experts else experts
    if parts.routers:
        router = parts.routers * case.stored
        state += StateBytes(router, router, parts.routers * case.optimizer, 0.0, 0.0)
    if case.moment_kind != "alike":
        state = replace(state, optimizer=optimizer_state_bytes(case, rank))
    return state


def play(
    schedule: Schedule, stages: Sequence[StageBytes]
) -> tuple[tuple[FullestActions, ...], tuple[float, ...]]:
    """What every rank holds at the fullest actions of the table, and how many micro-batches."""
    return fullest_actions(schedule, stages), peak_microbatches(schedule)


def _in_flight(
    case: Case, assumptions: Assumptions, replay: Replay
) -> tuple[tuple[FullestActions, ...], tuple[float, ...]]:
    """(what is held at the fullest actions, micro-batches), by pipeline rank."""
    imbalance = assumptions.load_imbalance
    if case.schedule is None:
        dense, routed = case.blocks_of_stage[0]
        kept = dense * kept_by_layer(case, False, imbalance) if dense else 0.0
        kept += routed * kept_by_layer(case, True, imbalance) if routed else 0.0
        if case.rounds_layers:  # the rounded weights of blocks that are not recomputed
            share = case.recompute.share if case.recompute.mode != "none" else 0.0
            elements = sum(
                count * sum(block_elements(case, kind)[:2])
                for kind, count in ((False, dense), (True, routed))
                if count
            )
            kept += (1 - share) * elements * case.element
        held = Held(kept, 0.0)
        return (FullestActions(None, held, None, held),), (1.0,)
    return replay(case.schedule, _stage_bytes(case, imbalance))


def _stage_bytes(case: Case, imbalance: float) -> list[StageBytes]:
    """Of each stage. Its blocks with experts are alike, and so are the others."""
    bytes_of_gradient = REDUCE_BYTES if case.working_copy else case.stored
    # what has the reduce type already is added up where it is made
    bytes_of_waiting = 0 if bytes_of_gradient == case.element or not case.working_copy else case.element
    # The input a stage was sent, and the output it sent, wait with its activations
    edge = case.stream_tokens * case.args.dim * case.element
    blocks = []
    for routed, there in enumerate(map(any, zip(*case.blocks_of_stage, strict=True))):
        if not there:
            blocks.append(StageBytes(0.0, 0.0, 0.0, 0.0, 0.0))
            continue
        put_off = put_off_elements(case, bool(routed))
        blocks.append(
            StageBytes(
                activation=kept_by_layer(case, bool(routed), imbalance),
                kept_for_weights=weight_gradient_bytes(case, bool(routed)),
                gradients=all_elements(case, bool(routed)) * bytes_of_gradient,
                put_off=put_off * bytes_of_gradient,
                waiting=put_off * bytes_of_waiting,
            )
        )
    found: list[StageBytes] = []
    alike: dict[tuple[int, int, float], StageBytes] = {}
    for stage, counts in enumerate(case.blocks_of_stage):
        ends = end_elements(case, stage) * bytes_of_gradient
        if (*counts, ends) not in alike:
            sums = [counts[0] * dense + counts[1] * routed for dense, routed in zip(*blocks, strict=True)]
            alike[*counts, ends] = StageBytes(sums[0] + edge, sums[1], sums[2] + ends, sums[3], sums[4])
        found.append(alike[*counts, ends])
    return found


def _rank_memory(
    case: Case, assumptions: Assumptions, rank: int, parts: RankParts, kept: FullestActions
) -> RankMemory:
    state, stages = rank_state(case, parts, rank), case.stages_of_rank(rank)
    layers = [layer for stage in stages for layer in case.layers_of_stage[stage]]
    imbalance = assumptions.load_imbalance
    # what is sharded lives in the host's memory under offload
    weights, moments = (0.0, 0.0) if case.offload else (state.weights, state.optimizer)
    steady = {
        "weights": weights,
        "moments": moments,
        "pipeline buffers": pipeline_buffers(case),
        "device context": assumptions.context,
    }
    found_at = step_moments(case, layers, parts, state, kept, imbalance)
    moment, values = max(found_at.items(), key=lambda one: sum(one[1].values()))
    lines = dict.fromkeys(LINES, 0.0) | steady | values
    comes_and_goes = sum(values.values()) + steady["pipeline buffers"]
    lines["fragmentation"] = assumptions.allocator * comes_and_goes
    return RankMemory(rank, "", 0.0, moment, lines)


def _has_head(case: Case, rank: int) -> bool:
    return len(case.stages) - 1 in case.stages_of_rank(rank)


def _kind(case: Case, rank: int) -> str:
    if case.topology.pp == 1:
        return "all ranks"
    names = {name for stage in case.stages_of_rank(rank) for name in case.stages[stage]}
    ends = [word for word, name in (("embedding", "tok_embeddings"), ("head", "output")) if name in names]
    place = "first" if rank == 0 else "last" if rank == case.n_ranks - 1 else "middle"
    return f"{place} ({' and '.join(ends)})" if ends else place
