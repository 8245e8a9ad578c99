"""What one rank sends in an optimizer step, by mesh axis: bytes, how often, over which links, and what is not hidden.

Bytes are the runtime's closed forms (docs/data_parallel.md, tensor_parallel.md, context_parallel.md,
expert_parallel.md, pipeline_parallel.md), counted as a ring sends them; the tests named there
hold the runtime to them. Hidden is what has computation beside it that does not need it:

    data       gathers and reductions of a unit under the computation of its neighbour; the first and the last are bare
    tensor     in backward the second gather, and the reduce-scatter of the input's gradient; all else waits
    context    each hop of the ring under the block before it; all-gather under the own block; Ulysses waits
    experts    the rows on their way there under the shared experts; all else waits
    pipeline   as the table has it (schedules/simulate.py), a message costing latency only
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from titan5d.plan.case import Case
from titan5d.plan.compute import BlockTime
from titan5d.plan.network import Group, Network
from titan5d.plan.parts import RankParts

FP32 = 4


@dataclass(frozen=True)
class Traffic:
    """One kind of message of one rank in one step.

    Attributes:
        axis: whose ranks it goes to; what: a few words.
        size: bytes a rank sends in a step; count: messages.
        time, exposed: seconds a step that the links, and that the rank, spend on it.
    """

    axis: str
    what: str
    group: Group
    size: float
    count: float
    time: float
    exposed: float

    @property
    def hidden(self) -> float:
        return self.time - self.exposed


def tensor_group(case: Case, network: Network) -> Group:
    return network.group(case.topology.tp, 1)


def context_group(case: Case, network: Network) -> Group:
    return network.group(case.topology.cp, case.topology.tp)


def shard_group(case: Case, network: Network) -> Group:
    return network.group(case.shards, case.topology.tp)


def replica_group(case: Case, network: Network) -> Group:
    topology = case.topology
    return network.group(topology.dp_replicate, topology.dp_shard * topology.cp * topology.tp)


def expert_group(case: Case, network: Network) -> Group:
    return network.group(case.topology.expert_ranks, 1)


def expert_shard_group(case: Case, network: Network) -> Group:
    return network.group(case.topology.efsdp, case.topology.expert_ranks)


def pipeline_group(case: Case, network: Network) -> Group:
    return network.group(case.topology.pp, case.topology.world_size // case.topology.pp)


def tensor_traffic(case: Case, network: Network) -> tuple[float, float, float, float, float]:
    """Of one block and micro-batch: (bytes sent, messages, forward seconds exposed, backward exposed, all seconds)."""
    tp = case.topology.tp
    if tp == 1:
        return 0.0, 0.0, 0.0, 0.0, 0.0
    group = tensor_group(case, network)
    whole = case.tokens * case.args.dim * case.element
    if case.sequence_parallel:
        one = network.ring(whole, group)
        regather = 2 if case.regather_input else 0
        forward, backward, hidden = 4.0, 2.0, 2.0 + regather
        again = _again(case) * 3  # two gathers, one sum: the last is not repeated
        each = whole * (tp - 1) / tp
    else:
        one = network.all_reduce(whole, group)
        forward, backward, hidden = 2.0, 1.0, 1.0
        again = _again(case) * 1.0
        each = 2 * whole * (tp - 1) / tp
    if case.async_tensor:  # a product in tp pieces hides all transfers but one piece's
        forward, again, backward = forward / tp, again / tp, backward / tp
    messages = (6 + hidden + _again(case) * 3) if case.sequence_parallel else 4.0 + _again(case)
    return each * messages, messages, forward * one, (backward + again) * one, messages * one


def _again(case: Case) -> float:
    """Share of the blocks whose forward, and so its messages, is repeated."""
    return case.recompute.share if case.recompute.mode == "full" else 0.0


def context_traffic(
    case: Case, network: Network, block: BlockTime
) -> tuple[float, float, float, float, float]:
    """Of one block and micro-batch: as `tensor_traffic`."""
    args, cp = case.args, case.topology.cp
    if cp == 1:
        return 0.0, 0.0, 0.0, 0.0, 0.0
    group = context_group(case, network)
    again = 1.0 + (_again(case) if case.recompute.mode == "full" else _selective(case))
    kv = 2 * case.tokens * max(args.n_kv_heads / case.topology.tp, 1) * args.head_dim
    if case.context_method == "ulysses":
        q = 2 * case.tokens * args.n_heads / case.topology.tp * args.head_dim
        size = (q + kv) * case.element
        time = 2 * network.all_to_all(size / 2, group)
        return size * (cp - 1) / cp * (again + 1), 2 * (again + 1), time, again * time, (again + 1) * time
    if case.context_method == "allgather":
        gather = network.ring(cp * kv * case.element, group)
        scatter = network.ring(cp * kv * FP32, group)
        forward = max(0.0, gather - block.attention / cp)
        backward = (again - 1) * forward + max(0.0, gather - 2.5 * block.attention / cp) + scatter
        size = kv * (cp - 1) * (case.element * (again + 1) + FP32)
        return size, again + 2, forward, backward, gather * (again + 1) + scatter
    hop, back = network.send(kv * case.element, group), network.send(kv * (case.element + FP32), group)
    step = block.attention / cp
    forward = (cp - 1) * max(0.0, hop - step)
    backward = (again - 1) * forward + (cp - 1) * max(0.0, back - 2.5 * step)
    size = (cp - 1) * kv * (case.element * (again + 1) + FP32)
    return size, (cp - 1) * (again + 2), forward, backward, (cp - 1) * (hop * again + back)


def _selective(case: Case) -> float:
    return case.recompute.share if case.recompute.mode == "selective" else 0.0


def expert_traffic(
    case: Case, network: Network, block: BlockTime, imbalance: float
) -> tuple[float, float, float, float, float]:
    """Of one block with experts and micro-batch: as `tensor_traffic`."""
    ranks, slices = case.topology.expert_ranks, case.topology.etp
    if ranks == 1:
        return 0.0, 0.0, 0.0, 0.0, 0.0
    group = expert_group(case, network)
    rows = slices * case.args.top_k * case.tokens / case.topology.tp * case.args.dim * case.element
    one = network.all_to_all(rows * imbalance, group)
    again = 2 * case.recompute.share if case.recompute.mode != "none" else 0.0
    forward = one + max(0.0, one - block.shared_experts)
    backward = one + max(0.0, one - 2 * block.shared_experts) + again * one
    return rows * (1 - 1 / ranks) * (4 + again), 4 + again, forward, backward, (4 + again) * one


def data_traffic(
    case: Case, network: Network, parts: RankParts, forward: float, backward: float
) -> list[Traffic]:
    """Gathers, reductions and all-reduces of one rank in one step.

    forward, backward: seconds that computing takes on one micro-batch of the rank, spread over its units: what hides.
    """
    found = _shared(case, network, parts.units, shard_group(case, network), "dp_shard", forward, backward)
    if parts.experts:
        group = expert_shard_group(case, network)
        whole = replace(case, reshard_degree=None)  # experts that are cut keep no larger shards (data.py)
        found += _shared(whole, network, parts.experts, group, "efsdp", forward / 2, backward / 2)
    if parts.routers:
        stage = network.group(case.topology.dp * case.topology.cp * case.topology.tp, 1)
        size = parts.routers * case.stored
        time = network.all_reduce(size, stage)
        if stage.size > 1:
            sent = 2 * size * (stage.size - 1) / stage.size
            found.append(Traffic("dp", "all-reduce of routers' gradients", stage, sent, 1, time, time))
    return found


def _shared(
    case: Case,
    network: Network,
    units: tuple[float, ...],
    group: Group,
    axis: str,
    forward: float,
    backward: float,
) -> list[Traffic]:
    """Of units that `group` shards, and replicas repeat."""
    if not units:
        return []
    found: list[Traffic] = []
    n, count, total = group.size, len(units), sum(units)
    replicas = replica_group(case, network)
    if case.zero_stage == 0:  # nothing is sharded: all ranks are replicas
        replicas = network.group(case.topology.dp_replicate * n, case.topology.tp)
    passes = case.microbatches
    each_forward, each_backward = forward / count, backward / count
    gathers_each = case.zero_stage == 3 and case.reshard_degree is None
    reduces = passes if case.zero_stage >= 2 and case.topology.pp == 1 else 1
    time_backward = 0.0
    if n > 1 and case.zero_stage > 0:
        gather = [network.ring(unit * case.element, group) for unit in units]
        reduce = [network.ring(unit * FP32, group) for unit in units]
        bare = gather[0] + sum(max(0.0, one - each_forward) for one in gather[1:])
        times = passes if case.zero_stage == 3 else 1
        sent = total * case.element * (n - 1) / n
        found.append(
            Traffic(
                axis,
                "gather weights, forward",
                group,
                times * sent,
                times * count,
                times * sum(gather),
                times * bare,
            )
        )
        again = 0.0
        if case.zero_stage == 3:
            inner, label = group, "gather weights, backward"
            if not gathers_each and case.reshard_degree:
                inner = network.group(case.reshard_degree, case.topology.tp)
                label = "gather weights, backward, inside regrouped shards"
            back = [
                network.ring(unit * case.element, inner) for unit in units[:-1]
            ]  # the last unit is still here
            again = sum(back)
            bare = sum(max(0.0, one - each_backward) for one in back)
            sent = sum(units[:-1]) * case.element * (inner.size - 1) / inner.size
            found.append(
                Traffic(
                    axis, label, inner, passes * sent, passes * (count - 1), passes * again, passes * bare
                )
            )
        beside = max(0.0, each_backward - again / count)
        bare = reduce[0] + sum(max(0.0, one - beside) for one in reduce[1:])
        sent = total * FP32 * (n - 1) / n
        found.append(
            Traffic(
                axis,
                "reduce-scatter gradients",
                group,
                reduces * sent,
                reduces * count,
                reduces * sum(reduce),
                reduces * bare,
            )
        )
        time_backward = (sum(reduce) + again) / count
    if replicas.size > 1:
        share = n if case.zero_stage > 0 else 1
        sums = [network.all_reduce(unit / share * FP32, replicas) for unit in units]
        beside = max(0.0, each_backward - time_backward)
        bare = sums[0] + sum(max(0.0, one - beside) for one in sums[1:])
        sent = 2 * total / share * FP32 * (replicas.size - 1) / replicas.size
        found.append(Traffic("dp_replicate", "all-reduce gradients", replicas, sent, count, sum(sums), bare))
    return found
