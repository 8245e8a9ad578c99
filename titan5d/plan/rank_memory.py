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
from titan5d.plan.memory import StateBytes, state_bytes
from titan5d.plan.parts import RankParts, rank_parts
from titan5d.plan.step_moments import pipeline_buffers, step_moments
from titan5d.schedules.memory import peak_memory
from titan5d.schedules.table import Schedule

Peaks = Callable[[Schedule, Sequence[float], Sequence[float]], tuple[float, ...]]
"""`schedules.memory.peak_memory`."""

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
    peaks: Peaks = peak_memory,
) -> tuple[RankMemory, ...]:
    """Every pipeline rank.

    Args:
        parts: of every rank, where they are known already. peaks: `peak_memory`, or one that remembers.
    """
    if parts is None:
        parts = [rank_parts(case, rank) for rank in range(case.n_ranks)]
    kept, in_flight = _activations_in_flight(case, assumptions, peaks)
    found: list[RankMemory] = []
    same: dict[tuple[RankParts, float, bool], RankMemory] = {}
    for rank in range(case.n_ranks):
        key = (parts[rank], kept[rank], _has_head(case, rank))
        if key not in same:
            same[key] = _rank_memory(case, assumptions, rank, parts[rank], kept[rank])
        found.append(replace(same[key], rank=rank, kind=_kind(case, rank), in_flight=in_flight[rank]))
    return tuple(found)


def kinds(ranks: tuple[RankMemory, ...]) -> list[RankMemory]:
    """One rank of each kind: the first and the last stage and the fullest between them."""
    between = max(ranks[1:-1], key=lambda one: one.total, default=None)
    chosen = [ranks[0], between, ranks[-1]] if len(ranks) > 1 else [ranks[0]]
    return [one for one in chosen if one is not None]


def fullest(ranks: tuple[RankMemory, ...]) -> RankMemory:
    """The rank that decides whether the run fits."""
    return max(ranks, key=lambda one: one.total)


def rank_state(case: Case, parts: RankParts) -> StateBytes:
    """Training state of a rank with these parts, experts that are cut and routers included."""
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
    )
    if parts.experts:
        state += state_bytes(
            int(sum(parts.experts)),
            int(max(parts.experts)),
            case.zero_stage,
            topology.efsdp,
            case.stored,
            case.element,
            case.optimizer,
            case.whole_gradients,
            topology.dp_replicate * topology.efsdp > 1 or case.stored != case.element,
        )
    if parts.routers:
        router = parts.routers * case.stored
        state += StateBytes(router, router, parts.routers * case.optimizer, 0.0, 0.0)
    return state


def _activations_in_flight(
    case: Case, assumptions: Assumptions, peaks: Peaks
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(bytes, micro-batches) kept at the fullest moment, by pipeline rank."""
    imbalance = assumptions.load_imbalance

    def of_stage(stage: int, of_block: Callable[[Case, bool], float]) -> float:
        layers = case.layers_of_stage[stage]
        routed = sum(case.args.has_experts(layer) for layer in layers)
        total = routed * of_block(case, True) if routed else 0.0
        return total + ((len(layers) - routed) * of_block(case, False) if len(layers) > routed else 0.0)

    def kept(case: Case, with_experts: bool) -> float:
        return kept_by_layer(case, with_experts, imbalance)

    schedule = case.schedule
    if schedule is None:
        return (of_stage(0, kept),), (1.0,)
    # The input a stage was sent, and the output it sent, wait with its activations
    edge = case.stream_tokens * case.args.dim * case.element
    held = [of_stage(stage, kept) + edge for stage in range(schedule.n_stages)]
    after_input = [of_stage(stage, weight_gradient_bytes) for stage in range(schedule.n_stages)]
    shares = [1 / len(case.stages_of_rank(rank)) for rank in schedule.rank_of_stage]  # of a micro-batch
    return peaks(schedule, held, after_input), peaks(schedule, shares, shares)


def _rank_memory(
    case: Case, assumptions: Assumptions, rank: int, parts: RankParts, kept: float
) -> RankMemory:
    state, stages = rank_state(case, parts), case.stages_of_rank(rank)
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
    found_at = step_moments(case, layers, parts, state, kept, _has_head(case, rank), imbalance)
    best: RankMemory | None = None
    for moment, values in found_at.items():
        lines = dict.fromkeys(LINES, 0.0) | steady | values
        comes_and_goes = sum(
            lines[name] for name in LINES if name not in ("weights", "moments", "device context")
        )
        lines["fragmentation"] = assumptions.allocator * comes_and_goes
        found = RankMemory(rank, "", 0.0, moment, lines)
        if best is None or found.total > best.total:
            best = found
    assert best is not None
    return best


def _has_head(case: Case, rank: int) -> bool:
    return len(case.stages) - 1 in case.stages_of_rank(rank)


def _kind(case: Case, rank: int) -> str:
    if case.topology.pp == 1:
        return "all ranks"
    names = {name for stage in case.stages_of_rank(rank) for name in case.stages[stage]}
    ends = [word for word, name in (("embedding", "tok_embeddings"), ("head", "output")) if name in names]
    place = "first" if rank == 0 else "last" if rank == case.n_ranks - 1 else "middle"
    return f"{place} ({' and '.join(ends)})" if ends else place
