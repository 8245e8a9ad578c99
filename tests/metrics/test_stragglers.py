"""The rank and the link that the others wait for."""

from __future__ import annotations

import logging
import time

import pytest
import torch
import torch.distributed as dist

from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.names import tensorboard_scalars
from titan5d.metrics.phases import StepPhases
from titan5d.metrics.stragglers import IN_A_ROW, Place, Sample, Stragglers, slow_links, slow_ranks, spread
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology


def places(stages: list[int]) -> list[Place]:
    """Four ranks in tp pairs."""
    return [
        Place(f"host{rank}", stage, {"tp": (0, 1) if rank < 2 else (2, 3)})
        for rank, stage in enumerate(stages)
    ]


def samples(busy: list[float], exposed: list[float], data: float = 0.0) -> list[Sample]:
    return [Sample(b, data, {"tp": e}) for b, e in zip(busy, exposed, strict=True)]


def test_the_busiest_rank_of_its_stage() -> None:
    given = samples([1.0, 1.1, 1.05, 1.6], [0.6, 0.5, 0.55, 0.0], data=0.4)
    assert spread(given, places([0] * 4)) == pytest.approx(
        {
            "rank_busy_min": 1.0,
            "rank_busy_median": 1.075,
            "rank_busy_max": 1.6,
            "rank_busy_slowest": 3,
            "time_link/tp": 0.5,
        }
    )
    ((subject, sentence),) = slow_ranks(given, places([0] * 4))
    assert subject == "rank 3"
    assert sentence == (
        "straggler: rank 3 (host3) works 1.6 s a step, of them 0.4 s waiting for data; the median rank of its stage"
        " 1.05 s, and waits for it"
    )
    # stages have different work: no rank of the second is slow for it
    assert slow_ranks(samples([1.0, 1.0, 2.0, 2.1], [0.0] * 4), places([0, 0, 1, 1])) == []


def test_a_slow_link_is_one_on_which_even_the_last_rank_stands_still() -> None:
    given = samples([1.0] * 4, [0.1, 0.9, 0.7, 0.6])
    ((_, sentence),) = slow_links(given, places([0] * 4))
    assert sentence == (
        "slow link: ranks 2, 3 (host2, host3) spend 0.6 s a step on transfers along tp, the median group 0.1 s"
    )
    assert (
        slow_links(samples([1.0] * 4, [0.001, 0.9, 0.01, 0.6]), places([0] * 4)) == []
    )  # too short to matter


def test_names_in_tensorboard() -> None:
    given = {"rank_busy_max": 1.5, "rank_busy_slowest": 3, "time_link/tp": 0.5}
    assert tensorboard_scalars(given, "AdamW") == {
        "ranks/busy_max(s)": 1.5,
        "ranks/busiest_rank": 3,
        "ranks/link_tp(s)": 0.5,
    }


def _train() -> tuple[list[dict[str, float]], list[str]]:
    """Steps of two ranks that meet in an all-reduce; rank 1 works three times as long."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("titan5d").addHandler(handler)
    device = torch.device("cpu")
    meshes = Meshes(Topology(dp_shard=2), "cpu")
    phases = StepPhases(device, meshes.groups())
    stragglers = Stragglers(meshes.groups(), 0, device)
    metrics = []
    for _ in range(IN_A_ROW + 1):
        start = time.perf_counter()
        with phases.step(), phases("forward"):
            time.sleep(0.05 if dist.get_rank() == 0 else 0.15)
            dist.all_reduce(torch.ones(4), group=meshes.group("dp_shard"))
        seconds = time.perf_counter() - start
        phases.metrics()
        metrics.append(stragglers.metrics(seconds, 0.0, phases.exposed))
    return metrics, lines


def test_a_slow_rank_of_two_is_found_though_both_end_their_steps_together() -> None:
    (first, said), (second, unsaid) = run_ranks(_train, 2)
    assert first == second
    assert [values["rank_busy_slowest"] for values in first] == [1] * len(first)
    for values in first:
        assert 0.04 < values["rank_busy_min"] < 0.12 < values["rank_busy_max"]
    assert len(said) == 1 and said[0].startswith("straggler: rank 1 (") and unsaid == []


def test_one_rank_has_nobody_to_wait_for() -> None:
    def body() -> dict[str, float]:
        meshes = Meshes(Topology(), "cpu")
        return Stragglers(meshes.groups(), 0, torch.device("cpu")).metrics(1.0, 0.1, {})

    assert run_ranks(body, 1) == [{}]
