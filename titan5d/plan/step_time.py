"""How long an optimizer step takes: computing and bare communication of each block, through the schedule's table.

    one pipeline rank    micro-batches one after the other + what data parallelism does not hide + the update
    several              the table, played against these times (schedules/simulate.py), and the same

A long table is played for some micro-batches only: once the pipe is full, each further one takes as long as the rank
with the most work.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan5d.plan.assumptions import Assumptions
from titan5d.plan.case import Case
from titan5d.plan.compute import BlockTime, Computer, block_time, head_time, update_time
from titan5d.plan.network import Network
from titan5d.plan.parts import rank_parts
from titan5d.plan.traffic import (
    Traffic,
    context_group,
    context_traffic,
    data_traffic,
    expert_group,
    expert_traffic,
    pipeline_group,
    tensor_group,
    tensor_traffic,
)
from titan5d.schedules import catalog
from titan5d.schedules.simulate import StageTimes, simulate
from titan5d.schedules.timeline import Timeline


@dataclass(frozen=True)
class StepTime:
    """One optimizer step.

    Attributes:
        total: seconds.
        parts: where they go on the rank that decides, by name; they add up to `total`.
        bubble: share of all pipeline ranks' time in which they wait, uneven stages included.
        traffic: of the fullest rank.
        timeline: of the table, None with one pipeline rank.
        rank: the pipeline rank with the most work.
    """

    total: float
    parts: dict[str, float]
    bubble: float
    traffic: tuple[Traffic, ...]
    timeline: Timeline | None
    rank: int


@dataclass(frozen=True)
class _Stage:
    """Seconds of one micro-batch in one stage."""

    forward: float
    input_grad: float
    weight_grad: float
    computing: float
    tensor: float
    context: float
    experts: float
    again: float


def step_time(case: Case, computer: Computer, network: Network, play: bool = True) -> StepTime:
    """Predicts one step. play: with the pipeline's bubble; without, the step cannot take less than what is returned."""
    assumptions = computer.assumptions
    blocks = _block_times(case, computer)
    talk = {kind: _talk(case, network, blocks[kind], assumptions, kind) for kind in blocks}
    head = head_time(case, computer)
    stages = [_stage(case, index, blocks, talk, head, assumptions) for index in range(len(case.stages))]

    m, schedule = case.microbatches, case.schedule
    work = [
        m
        * sum(
            stages[s].forward + stages[s].input_grad + stages[s].weight_grad for s in case.stages_of_rank(r)
        )
        for r in range(case.n_ranks)
    ]
    rank = max(range(case.n_ranks), key=work.__getitem__)
    timeline, passes, messages, beside = None, work[rank], 0.0, 0.0
    if schedule is not None and not play:
        passes = _least_makespan(case, stages, work)
    if schedule is not None and play:
        hop = _hop(case, network)
        times = StageTimes(
            tuple(stage.forward for stage in stages),
            tuple(stage.input_grad for stage in stages),
            tuple(stage.weight_grad for stage in stages),
            comm=hop,
        )
        timeline = simulate(schedule, times)
        longest = max(row[-1].end - row[0].start for row in timeline.spans)
        hidden_fill = assumptions.step_overlap * (timeline.makespan - longest)
        passes = timeline.makespan - hidden_fill + (m - schedule.microbatches) * work[rank] / m
        messages = _boundaries(case, rank) * 2 * m
        beside = 2 * messages * hop  # sent and received while others compute

    mine = case.stages_of_rank(rank)
    one_forward = sum(stages[s].forward for s in mine)
    one_backward = sum(stages[s].input_grad + stages[s].weight_grad for s in mine)
    parts_here = rank_parts(case, rank)
    data = data_traffic(case, network, parts_here, one_forward, one_backward)
    bare = sum(one.exposed for one in data)
    slowed = assumptions.overlap_cost * (beside + sum(one.hidden for one in data))
    shards = 1 if case.zero_stage == 0 else case.shards
    local = parts_here.shared / shards + parts_here.routers
    local += sum(parts_here.experts) / (1 if case.zero_stage == 0 else case.topology.efsdp)
    update = update_time(case, computer, local) + assumptions.step_overhead
    total = passes + bare + slowed + update

    def of(name: str) -> float:
        return m * sum(float(getattr(stages[s], name)) for s in mine)

    parts = {
        "computing": of("computing"),
        "recompute": of("again"),
        "tensor communication": of("tensor"),
        "context communication": of("context"),
        "expert communication": of("experts"),
        "data communication": bare,
        "slowed by hidden communication": slowed,
        "pipeline bubble": max(0.0, passes - work[rank]),
        "update and overhead": update,
    }
    parts["slowed by hidden communication"] += work[rank] - sum(
        parts[name]
        for name in (
            "computing",
            "recompute",
            "tensor communication",
            "context communication",
            "expert communication",
        )
    )
    busy = sum(work) / case.n_ranks
    return StepTime(
        total=total,
        parts=parts,
        bubble=1 - busy / passes if timeline is not None and passes else 0.0,
        traffic=(*_block_traffic(case, network, talk, rank), *_messages(case, network, messages), *data),
        timeline=timeline,
        rank=rank,
    )


_Talk = dict[str, tuple[float, float, float, float, float]]
"""Axis -> (bytes, messages, forward seconds exposed, backward seconds exposed, seconds) of one block."""


def _block_times(case: Case, computer: Computer) -> dict[bool, BlockTime]:
    """By whether the block has experts."""
    has = {case.args.has_experts(layer) for layer in range(case.args.n_layers)}
    return {kind: block_time(case, computer, kind) for kind in sorted(has)}


def _talk(case: Case, network: Network, block: BlockTime, assumptions: Assumptions, kind: bool) -> _Talk:
    experts = (0.0, 0.0, 0.0, 0.0, 0.0)
    if kind:
        experts = expert_traffic(case, network, block, assumptions.load_imbalance)
    return {
        "tp": tensor_traffic(case, network),
        "cp": context_traffic(case, network, block),
        "ep": experts,
    }


def _stage(
    case: Case,
    stage: int,
    blocks: dict[bool, BlockTime],
    talk: dict[bool, _Talk],
    head: BlockTime,
    assumptions: Assumptions,
) -> _Stage:
    forward = input_grad = weight_grad = computing = again = 0.0
    waits = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
    routed = sum(case.args.has_experts(layer) for layer in case.layers_of_stage[stage])
    for kind, count in ((True, routed), (False, len(case.layers_of_stage[stage]) - routed)):
        if not count:
            continue
        block, said = blocks[kind], talk[kind]
        bare_forward = sum(one[2] for one in said.values())
        bare_backward = sum(one[3] for one in said.values())
        hidden = sum(one[4] for one in said.values()) - bare_forward - bare_backward
        slowed = assumptions.overlap_cost * hidden
        forward += count * (block.forward + bare_forward)
        input_grad += count * (block.input_grad + block.again + bare_backward + slowed)
        weight_grad += count * block.weight_grad
        computing += count * (block.forward + block.input_grad + block.weight_grad)
        again += count * block.again
        for axis in waits:
            waits[axis] += count * (said[axis][2] + said[axis][3])
    if "output" in case.stages[stage]:
        forward += head.forward
        computing += head.forward
    return _Stage(forward, input_grad, weight_grad, computing, waits["tp"], waits["cp"], waits["ep"], again)


def _block_traffic(case: Case, network: Network, talk: dict[bool, _Talk], rank: int) -> list[Traffic]:
    """Of all blocks of a pipeline rank in one step."""
    groups = {
        "tp": (tensor_group(case, network), "gathers and sums of hidden states"),
        "cp": (context_group(case, network), f"keys and values ({case.context_method})"),
        "ep": (expert_group(case, network), "rows to their experts and back"),
    }
    layers = [layer for stage in case.stages_of_rank(rank) for layer in case.layers_of_stage[stage]]
    found = []
    for axis, (group, what) in groups.items():
        if group.size == 1:
            continue
        sums = [0.0] * 5
        for layer in layers:
            for index, value in enumerate(talk[case.args.has_experts(layer)][axis]):
                sums[index] += case.microbatches * value
        size, count, forward, backward, time = sums
        if axis == "ep" and case.topology.etp > 1:
            axis = "ep_etp"  # as the ranks that exchange rows are called in a run (mesh.py)
        if count:
            found.append(Traffic(axis, what, group, size, count, time, forward + backward))
    return found


def _hop(case: Case, network: Network) -> float:
    """Seconds of a message between neighbours of the pipeline."""
    size = case.stream_tokens * case.args.dim * case.element
    return network.send(size, pipeline_group(case, network))


def _least_makespan(case: Case, stages: list[_Stage], work: list[float]) -> float:
    """What no table can beat: a rank waits for the forwards before its first stage, works, and then the input gradients
    of those stages are still to be made (where W is put off, beside its last weight gradients)."""
    schedule = case.schedule
    assert schedule is not None
    split = schedule.name in catalog.SPLIT_BACKWARD
    least = 0.0
    for rank in range(case.n_ranks):
        before = stages[: case.stages_of_rank(rank)[0]]
        wait = sum(one.forward + (0.0 if split else one.input_grad + one.weight_grad) for one in before)
        least = max(least, work[rank] + wait)
    return least


def _boundaries(case: Case, rank: int) -> float:
    """Of the messages of one micro-batch, forward and back, those this rank sends one way (the mean of both)."""
    schedule = case.schedule
    assert schedule is not None
    crossings = 0
    for stage in range(schedule.n_stages - 1):
        here, there = schedule.rank_of_stage[stage], schedule.rank_of_stage[stage + 1]
        crossings += (here != there) * ((here == rank) + (there == rank))
    return crossings / 2


def _messages(case: Case, network: Network, count: float) -> list[Traffic]:
    if not count:
        return []
    size = case.stream_tokens * case.args.dim * case.element
    time = count * _hop(case, network)
    group = pipeline_group(case, network)
    # what of it is not hidden is part of the bubble
    return [Traffic("pp", "hidden states and their gradients", group, count * size, count, time, 0.0)]
