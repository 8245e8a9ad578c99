"""Degrees -> ranks, coordinates and groups. Pure Python: the planner uses it for 10,000 ranks.

The world is one grid, the pipeline outermost (it crosses the slowest links), tensor innermost (the fastest):

    rank = (((pp * dp_replicate + replicate) * dp_shard + shard) * cp + context) * tp + tensor

Experts fold into the same ranks: `dp_shard * cp * tp = efsdp * etp * ep`, so attention ranks are expert ranks and no
rank waits for the other kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The grid's axes, outermost first."""


@dataclass(frozen=True)
class Topology:
    """The degrees of one layout. All are at least 1 and their product is the world size."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def dp(self) -> int:
        """How many ranks see different rows of the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Over how many ranks one expert's weights are sharded."""
        return self.dp_shard * self.cp * self.tp // self.expert_ranks

    @property
    def expert_ranks(self) -> int:
        """How many ranks hold all experts of a layer among them, and exchange rows."""
        return self.ep * self.etp

    def degree(self, axis: str) -> int:
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name -> this rank's place on it."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.degree(axis))
        return place

    def rank(self, **coordinates: int) -> int:
        """The inverse of `coordinates`; axes not named are at 0."""
        rank = 0
        for axis in AXES:
            rank = rank * self.degree(axis) + coordinates.get(axis, 0)
        return rank

    def dp_rank(self, rank: int) -> int:
        """Which of the `dp` slices of the batch this rank reads: the same for its TP, CP and PP peers."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def groups(self, *axes: str) -> list[list[int]]:
        """Every group of ranks that differ only along `axes`, e.g. `groups("tp")` or `groups("dp_shard", "cp")`."""
        fixed = [axis for axis in AXES if axis not in axes]
        varied = [axis for axis in AXES if axis in axes]
        return [
            [
                self.rank(**dict(zip(fixed, outer, strict=True)), **dict(zip(varied, inner, strict=True)))
                for inner in product(*(range(self.degree(axis)) for axis in varied))
            ]
            for outer in product(*(range(self.degree(axis)) for axis in fixed))
        ]

    def __str__(self) -> str:
        names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
        named = [(name, getattr(self, name)) for name in names]
        return " x ".join(f"{name} {degree}" for name, degree in named if degree > 1) or "one rank"


def fill_degree(
    world_size: int, dp_replicate: int, dp_shard: int, cp: int, tp: int, pp: int, ep: int, etp: int = 1
) -> Topology:
    """Builds the topology of a world, `dp_shard = -1` standing for "the rest of the ranks".

    Raises ValueError naming each degree, the product and the world size when they do not fit.
    """
    degrees = {
        "data_parallel_replicate_degree": dp_replicate,
        "context_parallel_degree": cp,
        "tensor_parallel_degree": tp,
        "pipeline_parallel_degree": pp,
    }
    bad = [f"parallelism.{name} = {degree}" for name, degree in degrees.items() if degree < 1]
    if dp_shard < 1 and dp_shard != -1:
        bad.append(f"parallelism.data_parallel_shard_degree = {dp_shard}")
    if bad:
        raise ValueError(
            f"{', '.join(bad)}: a degree is 1 or more"
            " (only data_parallel_shard_degree may be -1, which means: all ranks that are left)"
        )
    others = prod(degrees.values())
    shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    if dp_shard == -1:
        if world_size % others:
            raise ValueError(
                f"parallelism: {shown} = {others} does not divide the {world_size} ranks of this run, so"
                f" data_parallel_shard_degree = -1 has no value; use a multiple of {others} ranks or smaller degrees"
            )
        dp_shard = world_size // others
    if others * dp_shard != world_size:
        raise ValueError(
            f"parallelism: data_parallel_shard_degree {dp_shard} x {shown} = {others * dp_shard}, but this run has"
            f" {world_size} ranks; start {others * dp_shard} ranks (NGPU x NNODES), or set"
            " data_parallel_shard_degree = -1 to take the rest"
        )
    return Topology(dp_replicate, dp_shard, cp, tp, pp, ep, etp)
