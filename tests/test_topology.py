from __future__ import annotations

import pytest

from titan5d.topology import AXES, Topology, fill_degree


def test_coordinates_and_rank_are_inverse_and_tensor_is_innermost() -> None:
    topology = Topology(dp_replicate=2, dp_shard=3, cp=2, tp=2, pp=2)
    assert topology.world_size == 48
    assert [topology.rank(**topology.coordinates(rank)) for rank in range(48)] == list(range(48))
    assert topology.coordinates(1) == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert topology.coordinates(24) == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0}


@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("dp_shard", "cp"), ("dp_replicate", "dp_shard"), AXES])
def test_groups_partition_the_world(axes: tuple[str, ...]) -> None:
    topology = Topology(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2)
    groups = topology.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(32))
    for group in groups:
        places = [topology.coordinates(rank) for rank in group]
        for axis in AXES:
            if axis not in axes:
                assert len({place[axis] for place in places}) == 1


def test_batch_place_is_shared_by_model_parallel_peers() -> None:
    topology = Topology(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2)
    for axis in ("tp", "cp", "pp"):
        for group in topology.groups(axis):
            assert len({topology.dp_rank(rank) for rank in group}) == 1
    for group in topology.groups("dp_replicate", "dp_shard"):
        assert sorted(topology.dp_rank(rank) for rank in group) == [0, 1, 2, 3]


def test_ten_thousand_ranks_are_cheap() -> None:
    topology = Topology(dp_replicate=4, dp_shard=20, cp=2, tp=8, pp=8)
    assert sum(len(group) for group in topology.groups("tp")) == topology.world_size == 10240


def test_experts_fold_into_the_ranks_that_are_there() -> None:
    topology = fill_degree(64, 2, -1, 2, 4, 1, 2, 4)
    assert (topology.dp_shard, topology.expert_ranks, topology.efsdp) == (4, 8, 4)
    assert str(topology) == "dp_replicate 2 x dp_shard 4 x cp 2 x tp 4 x ep 2 x etp 4"


def test_minus_one_takes_the_rest() -> None:
    assert fill_degree(4, 1, -1, 1, 2, 1, 1) == Topology(dp_shard=2, tp=2)


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ((1, -1, 1, 3, 1, 1), "tensor_parallel_degree 3"),
        ((1, 2, 1, 1, 1, 1), "= 2, but this run has 4 ranks"),
        ((-1, -1, 1, 1, 1, 1), "data_parallel_replicate_degree = -1"),
        ((1, 0, 1, 1, 1, 1), "data_parallel_shard_degree = 0"),
        ((1, 1, 2, 2, 2, 1), "= 8, but this run has 4 ranks"),
    ],
)
def test_degrees_that_do_not_fit_are_named(degrees: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match="parallelism") as error:
        fill_degree(4, *degrees)
    assert said in str(error.value)
