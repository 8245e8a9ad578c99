"""Layouts in a word: what can be written, what is refused and how, and the lists."""

from __future__ import annotations

import pytest

from titan5d.topology import Topology
from titan5d.verify.layouts import LayoutError, all_pairs, of_world, parse_layout, parse_layouts


@pytest.mark.parametrize(
    ("word", "topology", "stage"),
    [
        ("dp2", Topology(dp_shard=2), None),
        ("hsdp2x4", Topology(dp_replicate=2, dp_shard=4), None),
        ("r2dp4", Topology(dp_replicate=2, dp_shard=4), None),
        ("pp2cp2tp2dp2ep4z1", Topology(dp_shard=2, cp=2, tp=2, pp=2, ep=4), 1),
        ("tp4z0", Topology(tp=4), 0),
        ("etp2ep2dp4", Topology(dp_shard=4, ep=2, etp=2), None),
        ("one", Topology(), None),
    ],
)
def test_words(word: str, topology: Topology, stage: int | None) -> None:
    cuts = parse_layout(word)
    assert (cuts.topology, cuts.zero_stage) == (topology, stage)
    assert parse_layout(str(cuts)) == cuts  # what is printed can be typed


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("dp2xp2", "'xp2'"),
        ("dp", "'dp'"),
        ("2dp", "'2dp'"),
        ("tp2tp2", "tp a second time"),
        ("hsdp2x2dp2", "dp a second time"),
        ("dp2z4", "'z4' is no ZeRO stage"),
        ("tp0", "'tp0' has no ranks"),
        ("dp8tp4", "32 ranks"),
        ("oneone", "'oneone'"),
        (" , ", "names no layout"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, piece: str) -> None:
    with pytest.raises(LayoutError) as raised:
        parse_layouts(text)
    assert piece in str(raised.value)
    assert "dp2tp2" in str(raised.value) or "smaller ones" in str(raised.value)


def test_lists() -> None:
    assert [str(cuts) for cuts in parse_layouts("dp2tp2, pp2cp2")] == ["dp2tp2", "cp2pp2"]
    dense = [str(cuts) for cuts in all_pairs(False)]
    assert len(dense) == len(set(dense)) == 5 + 10
    experts = [str(cuts) for cuts in all_pairs(True)]
    assert len(experts) == 15 + 9 and all("ep2" in name or "etp2" in name for name in experts[15:])


def test_every_layout_of_a_world_once() -> None:
    """4 ranks on five axes: one axis of 4, or two of 2."""
    four = of_world(4, n_experts=0)
    assert len(four) == len(set(four)) == 5 + 10
    assert all(cuts.topology.world_size == 4 for cuts in four)
    with_experts = of_world(4, n_experts=8)
    assert {cuts.topology.ep for cuts in with_experts if cuts.topology.dp_shard == 4} == {1, 2, 4}
    assert {cuts.topology.ep for cuts in with_experts if cuts.topology.pp == 4} == {1}
    expert_cuts = [(cuts.topology.ep, cuts.topology.etp) for cuts in with_experts if cuts.topology.dp_shard == 4]
    assert sorted(expert_cuts) == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    with pytest.raises(LayoutError, match="worlds of 1 to 16"):
        of_world(17, 0)
