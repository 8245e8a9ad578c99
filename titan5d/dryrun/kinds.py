"""Which ranks of a world differ in what they do, and are worth a look."""

from __future__ import annotations

from dataclasses import dataclass

from titan5d.config.check import Layout


@dataclass(frozen=True)
class RankKind:
    """One rank, and what it stands for."""

    rank: int
    name: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


def rank_kinds(layout: Layout) -> list[RankKind]:
    """The first rank, the last, and of those between the one with the most layers: one rank of each on every other
    axis. Without a pipeline all ranks do the same."""
    last = layout.topology.pp - 1
    chosen = [0]
    if layout.pipeline is not None:
        between = range(1, last)
        chosen += [max(between, key=lambda place: _layers(layout, place))] if between else []
        chosen += [last]
    return [kind_of(layout, layout.topology.rank(pp=place)) for place in chosen]


def kind_of(layout: Layout, rank: int) -> RankKind:
    """Raises ValueError for a rank outside of the world."""
    place = layout.topology.coordinates(rank)["pp"]
    if layout.pipeline is None:
        return RankKind(rank, "all ranks do the same")
    stages = layout.pipeline.schedule.stages_of_rank(place)
    n_stages = layout.pipeline.schedule.n_stages
    ends = [name for name, stage in (("first", 0), ("last", n_stages - 1)) if stage in stages]
    numbers = ", ".join(map(str, stages))
    return RankKind(rank, f"{' and '.join(ends) or 'middle'} stage: {numbers} of 0..{n_stages - 1}")


def _layers(layout: Layout, place: int) -> int:
    assert layout.pipeline is not None
    return sum(len(layout.pipeline.stages[stage]) for stage in layout.pipeline.schedule.stages_of_rank(place))
