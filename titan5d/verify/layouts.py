"""Layouts in a word, and lists of them: which cuts, in what degree.

    dp2        2 ranks with other rows each, state sharded over them as zero_stage says
    r2dp2      2 replicas of 2 sharding ranks (HSDP); hsdp2x2 means the same; r2 alone: replicas only
    tp2 cp2 pp2    tensor, context and pipeline ranks
    ep2        the experts are shared by 2 of the dp x cp x tp ranks: no ranks of its own
    etp2       each expert is cut in 2 slices, held by 2 of those ranks: dp4ep2etp2
    z1 z2 z3   the ZeRO stage, instead of the config's; z0 = everything on every rank
    one        a single process, executed as the config says

Pieces are written one after the other in any order, each kind once: `dp2tp2pp2`, `r2dp2cp2z3`, `dp4ep2`. Between
layouts stand commas. Pure Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Literal, cast

from titan5d.topology import Topology

MAX_RANKS = 16
"""Processes that one layout may have: each holds torch in memory, and all share the cores of one machine."""
GRAMMAR = (
    "a layout is written as dp2 (sharding data ranks), r2dp2 or hsdp2x2 (replicas x sharding ranks), tp2, cp2, pp2,"
    " ep2, etp2, and z0 to z3 for the ZeRO stage, one after the other: dp2tp2, r2dp2cp2z3, dp4ep2; `one` = one process;"
    " commas between layouts"
)
_AXES = {"r": "dp_replicate", "dp": "dp_shard", "tp": "tp", "cp": "cp", "pp": "pp", "ep": "ep", "etp": "etp"}
_PIECE = re.compile(r"hsdp(?P<replicas>\d+)x(?P<shards>\d+)|(?P<kind>dp|tp|cp|pp|ep|etp|r|z)(?P<degree>\d+)")


class LayoutError(ValueError):
    """A layout that cannot be read or is too large; the message names the piece and shows the grammar."""


@dataclass(frozen=True)
class Cuts:
    """One layout: degrees, and the ZeRO stage if it is not the config's."""

    topology: Topology
    zero_stage: Literal[0, 1, 2, 3] | None = None

    def __str__(self) -> str:
        named = [
            f"{word}{getattr(self.topology, axis)}"
            for word, axis in _AXES.items()
            if getattr(self.topology, axis) > 1
        ]
        stage = [] if self.zero_stage is None else [f"z{self.zero_stage}"]
        return "".join(named + stage) or "one"


def parse_layouts(text: str) -> list[Cuts]:
    """The layouts of a comma-separated list. Raises LayoutError."""
    words = [word.strip() for word in text.split(",")]
    if not any(words):
        raise LayoutError(f"--layouts {text!r} names no layout; {GRAMMAR}")
    return [parse_layout(word) for word in words if word]


def parse_layout(word: str) -> Cuts:
    """One layout. Raises LayoutError."""
    degrees: dict[str, int] = {}
    at = 4 if word == "one" else 0
    while at < len(word):
        match = _PIECE.match(word, at)
        if match is None:
            raise LayoutError(f"layout {word!r}: cannot read {word[at:]!r}; {GRAMMAR}")
        pieces = {match["kind"]: match["degree"]}
        if match["kind"] is None:
            pieces = {"r": match["replicas"], "dp": match["shards"]}
        for kind, number in pieces.items():
            if kind in degrees:
                raise LayoutError(f"layout {word!r}: {match[0]!r} says {kind} a second time; {GRAMMAR}")
            degrees[kind] = int(number)
            if kind == "z" and degrees[kind] > 3:
                raise LayoutError(
                    f"layout {word!r}: {match[0]!r} is no ZeRO stage, they are z0 to z3; {GRAMMAR}"
                )
            if kind != "z" and degrees[kind] < 1:
                raise LayoutError(
                    f"layout {word!r}: {match[0]!r} has no ranks, a degree is 1 or more; {GRAMMAR}"
                )
        at = match.end()
    stage = cast(Literal[0, 1, 2, 3] | None, degrees.pop("z", None))
    cuts = Cuts(Topology(**{_AXES[kind]: degree for kind, degree in degrees.items()}), stage)
    if cuts.topology.world_size > MAX_RANKS:
        raise LayoutError(
            f"layout {word!r} has {cuts.topology.world_size} ranks, verify runs at most {MAX_RANKS}: parity does not"
            " depend on the degrees, use smaller ones (2 each)"
        )
    return cuts


def all_pairs(has_experts: bool) -> list[Cuts]:
    """Every cut alone and every two together, two ranks each. The experts' cut lies over the ranks of another one."""
    axes = ("dp_shard", "dp_replicate", "tp", "cp", "pp")
    chosen = [*combinations(axes, 1), *combinations(axes, 2)]
    layouts = [Topology(**dict.fromkeys(names, 2)) for names in chosen]
    if has_experts:
        layouts += [
            Topology(dp_shard=2, ep=2),
            Topology(dp_shard=4, ep=2),
            Topology(dp_replicate=2, dp_shard=2, ep=2),
            Topology(tp=2, ep=2),
            Topology(cp=2, ep=2),
            Topology(pp=2, dp_shard=2, ep=2),
            Topology(dp_shard=2, etp=2),
            Topology(dp_shard=4, ep=2, etp=2),
            Topology(tp=2, etp=2),
        ]
    return [Cuts(topology) for topology in layouts]


def of_world(ranks: int, n_experts: int) -> list[Cuts]:
    """Every layout of so many ranks; whether each is legal for a model is config/check.py's to say.

    Raises LayoutError when there are more ranks than MAX_RANKS, or less than 1.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise LayoutError(f"--world {ranks}: verify runs worlds of 1 to {MAX_RANKS} ranks")
    found = []
    for degrees in product(_divisors(ranks), repeat=5):
        if prod(degrees) != ranks:
            continue
        replicas, shards, tp, cp, pp = degrees
        sharing = shards * cp * tp
        for ep in _divisors(sharing) if n_experts else (1,):
            for etp in _divisors(sharing // ep) if n_experts else (1,):
                found.append(Cuts(Topology(replicas, shards, cp, tp, pp, ep, etp)))
    return found


def _divisors(number: int) -> list[int]:
    return list(_each_divisor(number))


def _each_divisor(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)
