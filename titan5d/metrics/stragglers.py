"""Which rank the others wait for, and which link: the spread over ranks of a step that takes all of them equally long.

Ranks that train together end their steps together, so step times say nothing. What differs is how they spend them:

    rank 0   busy -------------------- exposed communication ----------        busy = step - exposed
    rank 1   busy -------------------------------------------------- ex        the straggler: busiest, waits least

Ranks of different pipeline stages have different work and are compared within their stage. The same measurement tells
slow links: the rank of a group that comes last waits for nobody, so what even it stands still is the transfer itself.
"""

from __future__ import annotations

import logging
import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

log = logging.getLogger("titan5d")

SLOW_RANK = 1.3
"""Times the busy time of the median rank of its stage: a straggler."""
SLOW_LINK = 2.0
"""Times the transfer time of the median group of its axis: a slow link."""
IN_A_ROW = 5
"""Logged steps, one after the other, before anything is said: a rank may be late once."""
LEAST = 0.02
"""Seconds a step below which no link is called slow."""
NO_LINKS = ("pp",)
"""Waiting there is mostly the pipeline's bubble."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its host, its pipeline stage, and axis -> the ranks of its group."""

    host: str
    stage: int
    groups: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sample:
    """Seconds a step on one rank: busy, of it waiting for data, and exposed communication by axis."""

    busy: float
    data: float
    exposed: Mapping[str, float]


class Stragglers:
    """Compares ranks at logged steps. Building it, and `metrics`, are collective.

    Args:
        groups: axis -> this rank's group; the axes that `metrics` will be given.
        stage: this rank's place in the pipeline.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], stage: int, device: torch.device) -> None:
        self.axes, self.device = [axis for axis, group in groups.items() if group.size() > 1], device
        ranks = {axis: tuple(dist.get_process_group_ranks(groups[axis])) for axis in self.axes}
        mine = Place(socket.gethostname(), stage, ranks)
        self.places: list[Place] = [mine] * dist.get_world_size()
        dist.all_gather_object(self.places, mine)
        self._suspects: dict[str, int] = {}  # sentence's subject -> logged steps in a row
        self._told: set[str] = set()

    def metrics(self, step: float, data: float, exposed: Mapping[str, float]) -> dict[str, float]:
        """Gathers one logged interval, and says what is slow when it has been so for some time. Nothing for a single
        rank.

        Args:
            step, data: seconds a step, and of it waiting for data.
            exposed: axis -> seconds a step this rank stood still for communication.
        """
        if len(self.places) == 1:
            return {}
        busy = max(0.0, step - sum(exposed.values()))
        mine = torch.tensor(
            [busy, data, *(exposed.get(axis, 0.0) for axis in self.axes)],
            dtype=torch.float64,
            device=self.device,
        )
        everyone = [torch.empty_like(mine) for _ in self.places]
        dist.all_gather(everyone, mine)
        samples = [
            Sample(row[0], row[1], dict(zip(self.axes, row[2:], strict=True)))
            for row in (tensor.tolist() for tensor in everyone)
        ]
        self._warn([*slow_ranks(samples, self.places), *slow_links(samples, self.places)])
        return spread(samples, self.places)

    def _warn(self, suspicions: Sequence[tuple[str, str]]) -> None:
        self._suspects = {subject: self._suspects.get(subject, 0) + 1 for subject, _ in suspicions}
        for subject, sentence in suspicions:
            if self._suspects[subject] >= IN_A_ROW and subject not in self._told:
                self._told.add(subject)
                if dist.get_rank() == 0:
                    log.warning("%s", sentence)


def spread(samples: Sequence[Sample], places: Sequence[Place]) -> dict[str, float]:
    """`rank_busy_*`: seconds a step of the least busy, median and busiest rank, and which that is; `time_link/<axis>`:
    seconds a step that even the last rank of the slowest group stands still."""
    busy = [sample.busy for sample in samples]
    found: dict[str, float] = {
        "rank_busy_min": min(busy),
        "rank_busy_median": statistics.median(busy),
        "rank_busy_max": max(busy),
        "rank_busy_slowest": max(range(len(busy)), key=busy.__getitem__),
    }
    for axis, groups in transfer_times(samples, places).items():
        found[f"time_link/{axis}"] = max(groups.values())
    return found


def transfer_times(
    samples: Sequence[Sample], places: Sequence[Place]
) -> dict[str, dict[tuple[int, ...], float]]:
    """Axis -> ranks of a group -> the least that one of them stood still, in seconds a step."""
    found: dict[str, dict[tuple[int, ...], float]] = {}
    for place in places:
        for axis, ranks in place.groups.items():
            if axis not in NO_LINKS:
                least = min(samples[rank].exposed.get(axis, 0.0) for rank in ranks)
                found.setdefault(axis, {})[ranks] = least
    return found


def slow_ranks(samples: Sequence[Sample], places: Sequence[Place]) -> list[tuple[str, str]]:
    """(subject, sentence) of each rank that is far busier than the median rank of its pipeline stage."""
    found = []
    for stage in sorted({place.stage for place in places}):
        ranks = [rank for rank, place in enumerate(places) if place.stage == stage]
        median = statistics.median_low(samples[rank].busy for rank in ranks)
        for rank in ranks:
            sample = samples[rank]
            if len(ranks) > 1 and sample.busy > SLOW_RANK * median:
                data = (
                    f", of them {sample.data:.3g} s waiting for data"
                    if sample.data > sample.busy / 10
                    else ""
                )
                found.append(
                    (
                        f"rank {rank}",
                        f"straggler: rank {rank} ({places[rank].host}) works {sample.busy:.3g} s a step{data}; the"
                        f" median rank of its stage {median:.3g} s, and waits for it",
                    )
                )
    return found


def slow_links(samples: Sequence[Sample], places: Sequence[Place]) -> list[tuple[str, str]]:
    """(subject, sentence) of each group whose transfers take far longer than those of the median group of its axis."""
    found = []
    for axis, groups in transfer_times(samples, places).items():
        median = statistics.median_low(groups.values())
        for ranks, seconds in groups.items():
            if seconds > max(LEAST, SLOW_LINK * median):
                hosts = ", ".join(sorted({places[rank].host for rank in ranks}))
                found.append(
                    (
                        f"{axis} {ranks}",
                        f"slow link: ranks {', '.join(map(str, ranks))} ({hosts}) spend {seconds:.3g} s a step on"
                        f" transfers along {axis}, the median group {median:.3g} s",
                    )
                )
    return found
