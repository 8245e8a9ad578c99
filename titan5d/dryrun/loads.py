"""How many rows the experts of a rank get: nobody knows without data, so it is assumed, and said so.

imbalance 1     every rank gets what every other gets
imbalance f     this rank is the fullest: f times its even share arrives from each rank, its own included, and what
                it sends to the others is that much less
"""

from __future__ import annotations

from titan5d.models.decoder import Decoder
from titan5d.models.moe import MoE
from titan5d.parallel.expert_dispatch import AllToAll


def assumed_counts(n_rows: int, ranks: int, imbalance: float) -> list[list[int]]:
    """[rows to each rank, rows from each rank] of a rank with `n_rows`; the first rank stands for this one.

    Rows are whole: what does not divide goes to the ranks in front.
    """
    mine = min(n_rows, round(n_rows / ranks * imbalance))
    if ranks == 1:
        return [[n_rows], [n_rows]]
    rest = n_rows - mine
    others = [rest // (ranks - 1) + (place < rest % (ranks - 1)) for place in range(ranks - 1)]
    return [[mine, *others], [mine] * ranks]


class AssumedLoads:
    """Stands for reading the counts off the device (AllToAll.read_counts).

    Args:
        rank: of `ranks` that share the experts, in each of `slices` groups that hold a slice of them.
    """

    def __init__(self, rank: int, ranks: int, imbalance: float, slices: int = 1) -> None:
        self.rank, self.ranks, self.imbalance, self.slices = rank, ranks, imbalance, slices

    def __call__(self, counts: object, n_rows: int) -> list[list[int]]:
        found = assumed_counts(n_rows, self.ranks, self.imbalance)
        return [_moved(rows, self.rank) * self.slices for rows in found]


def _moved(rows: list[int], rank: int) -> list[int]:
    """The first number to place `rank`."""
    return rows[1 : rank + 1] + rows[:1] + rows[rank + 1 :]


def assume_loads(model: Decoder, imbalance: float) -> None:
    """Every exchange of `model` takes the assumed counts for the true ones."""
    for module in model.modules():
        if isinstance(module, MoE) and isinstance(module.exchange, AllToAll):
            group, slices = module.exchange.group, module.exchange.slices
            ranks = group.size() // slices
            module.exchange.read_counts = AssumedLoads(group.rank() % ranks, ranks, imbalance, slices)
