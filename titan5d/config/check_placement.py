"""Where the groups of a layout lie: inside nodes, or over the network between them. Notes for the log, no refusals.

    rank = (((pp * dp_replicate + replicate) * dp_shard + shard) * cp + context) * tp + tensor       (topology.py)

    inside a node  <--  tensor  |  context, expert  |  shards of one replica  |  replicas, pipeline  -->  between nodes
    bytes a step        most       of every layer      of every weight           gradients, activations     fewest

The ranks of a node are neighbours, so the groups of an axis lie inside nodes if and only if the block of neighbours
that one of them spans divides the ranks of a node.
"""

from __future__ import annotations

from titan5d.topology import Topology


def layout_notes(topology: Topology, ranks_per_node: int) -> list[str]:
    """A sentence for each kind of group that crosses nodes at a price, with what would keep it inside."""
    if topology.world_size <= ranks_per_node:
        return []
    tensor = topology.tp
    row = topology.cp * tensor
    shards = topology.dp_shard * row
    if topology.tp > 1 and _crosses(tensor, ranks_per_node):
        # All blocks further out cross as well; the innermost is the one to mend
        return [
            f"parallelism.tensor_parallel_degree = {tensor} spans nodes of {ranks_per_node} ranks: every block waits"
            f" for at least 8 collectives over the network between them. {_fitting(1, ranks_per_node, 'A degree')}"
            " keeps them inside a node; data, context and pipeline parallelism need far less between nodes"
        ]
    notes = []
    if topology.cp > 1 and _crosses(row, ranks_per_node):
        notes.append(
            f"parallelism.context_parallel_degree = {topology.cp} x tensor_parallel_degree = {tensor} spans nodes of"
            f" {ranks_per_node} ranks: keys and values of every layer travel between them. "
            f"{_fitting(tensor, ranks_per_node, 'A context_parallel_degree')} keeps them inside; longer rows than"
            " that holds are worth the network only from tens of thousands of tokens a rank"
        )
    if topology.expert_ranks > 1 and _crosses(topology.expert_ranks, ranks_per_node):
        cut = topology.etp > 1
        slices = f" x expert_tensor_parallel_degree = {topology.etp}" if cut else ""
        notes.append(
            f"parallelism.expert_parallel_degree = {topology.ep}{slices} spans nodes of {ranks_per_node} ranks: every"
            f" routed token of every MoE layer travels between them{', once for each slice' if cut else ''}."
            f" {_fitting(1, ranks_per_node, 'A product' if cut else 'A degree')} keeps them"
            " inside; else model.n_expert_groups and n_limited_groups bound the nodes a token goes to"
        )
    if topology.dp_replicate > 1 and topology.dp_shard > 1 and _crosses(shards, ranks_per_node):
        notes.append(_hybrid(topology, row, shards, ranks_per_node))
    return notes


def _hybrid(topology: Topology, row: int, shards: int, ranks_per_node: int) -> str:
    crossing = (
        f"parallelism.data_parallel_shard_degree = {topology.dp_shard}: a replica's {shards} ranks (with context and"
        f" tensor parallelism) do not lie inside nodes of {ranks_per_node}, so that weights are gathered over the"
        " network, which replicas are there to avoid. "
    )
    inside = ranks_per_node // row
    if inside < 1 or ranks_per_node % row or topology.dp % inside:
        return (
            crossing + f"A replica that divides the {ranks_per_node} ranks of a node needs smaller cp or tp"
        )
    return crossing + (
        f"data_parallel_shard_degree = {inside} with data_parallel_replicate_degree = {topology.dp // inside} keeps"
        " them inside, if the weights fit"
    )


def _crosses(block: int, ranks_per_node: int) -> bool:
    return ranks_per_node % block != 0


def _fitting(inner: int, ranks_per_node: int, what: str) -> str:
    """Degrees of an axis with `inner` ranks further in that fit a node, in words."""
    if ranks_per_node % inner:
        return f"Only 1 as {what[0].lower()}{what[1:]}"
    room = ranks_per_node // inner
    divisors = [str(degree) for degree in range(1, room + 1) if room % degree == 0]
    return f"{what} of {' or '.join(filter(None, (', '.join(divisors[:-1]), divisors[-1])))}"
