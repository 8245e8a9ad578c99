"""Groups that cross nodes are named with what would keep them inside; the claim is checked against the groups."""

from __future__ import annotations

from itertools import product

import pytest

from titan5d.config.check_placement import layout_notes
from titan5d.topology import Topology


def crosses(topology: Topology, axes: tuple[str, ...], ranks_per_node: int) -> bool:
    """Whether any group along the axes has ranks on two nodes: by listing them."""
    return any(len({rank // ranks_per_node for rank in group}) > 1 for group in topology.groups(*axes))


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 6, 8])
def test_a_note_says_what_the_groups_do(ranks_per_node: int) -> None:
    seen = set()
    for replicate, shard, cp, tp in product((1, 2, 3), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        topology = Topology(replicate, shard, cp, tp)
        notes = " ".join(layout_notes(topology, ranks_per_node))
        tensor = crosses(topology, ("tp",), ranks_per_node)
        # With tensor groups over nodes there is only the one note
        context = not tensor and cp > 1 and crosses(topology, ("cp", "tp"), ranks_per_node)
        hybrid = replicate > 1 and shard > 1 and crosses(topology, ("dp_shard", "cp", "tp"), ranks_per_node)
        assert ("tensor_parallel_degree" in notes and "8 collectives" in notes) == tensor, topology
        assert ("keys and values" in notes) == context, topology
        assert ("weights are gathered over the network" in notes) == (hybrid and not tensor), topology
        seen.add((tensor, context, hybrid))
    assert len(seen) > 2


def test_one_node_has_no_network() -> None:
    assert layout_notes(Topology(tp=3, cp=2), 8) == []
    assert layout_notes(Topology(dp_replicate=2, dp_shard=4), 8) == []


def test_the_fix_of_tensor_groups_is_a_degree_that_divides_a_node() -> None:
    (note,) = layout_notes(Topology(tp=16), 8)
    assert (
        "tensor_parallel_degree = 16 spans nodes of 8 ranks" in note
        and "A degree of 1, 2, 4 or 8 keeps" in note
    )
    (note,) = layout_notes(Topology(dp_shard=3, tp=4), 6)
    assert "A degree of 1, 2, 3 or 6 keeps" in note
    assert layout_notes(Topology(tp=8, pp=4), 8) == []


def test_the_fix_of_context_groups_leaves_room_for_tensor_groups() -> None:
    (note,) = layout_notes(Topology(cp=4, tp=4), 8)
    assert "context_parallel_degree = 4 x tensor_parallel_degree = 4 spans nodes of 8" in note
    assert "A context_parallel_degree of 1 or 2 keeps" in note


def test_expert_groups() -> None:
    (note,) = layout_notes(Topology(dp_shard=16, ep=16), 8)
    assert "expert_parallel_degree = 16 spans nodes of 8 ranks" in note
    assert layout_notes(Topology(dp_shard=16, ep=8), 8) == []
    (note,) = layout_notes(Topology(dp_shard=16, ep=8, etp=2), 8)
    assert "expert_parallel_degree = 8 x expert_tensor_parallel_degree = 2 spans nodes of 8" in note
    assert "once for each slice. A product of 1, 2, 4 or 8 keeps" in note
    assert layout_notes(Topology(dp_shard=16, ep=4, etp=2), 8) == []


def test_the_fix_of_hybrid_sharding_is_one_replica_a_node() -> None:
    """The wrong way round moved four times the bytes between nodes (docs/multinode.md)."""
    (note,) = layout_notes(Topology(dp_replicate=8, dp_shard=2 * 8, tp=2), 8)
    assert "data_parallel_shard_degree = 4 with data_parallel_replicate_degree = 32 keeps" in note
    assert layout_notes(Topology(dp_replicate=32, dp_shard=4, tp=2), 8) == []
    (note,) = layout_notes(Topology(dp_replicate=2, dp_shard=2, cp=4), 2)[1:]
    assert "needs smaller cp or tp" in note
