"""What all ranks must know alike: one group of its own on the CPU, so that no wait here meets a training collective.

Small objects only, and all of this program's own making. Its time limit is long: ranks come here after writing to disks
of different speed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

class Agreement:
    """Every method is called by all ranks together; building it, too.

    Args:
        time_limit: seconds of the longest wait for the slowest rank's disk.
    """

    def __init__(self, time_limit: float) -> None:
        # Making a group waits for all ranks as long as the group's own calls may, and nobody sees that wait; this one
        # has the limit of the start, and the watchdog looks at it
        dist.barrier()
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=time_limit))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def gather(self, mine: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        found: list[T] = [mine] * self.ranks
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def from_rank_0(self, value: T) -> T:
        """Rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def problems(self, mine: list[str]) -> list[str]:
        """The problems of all ranks: each once, naming the first rank that has it."""
        found: dict[str, int] = {}
        for rank, problems in enumerate(self.gather(mine)):
            for problem in problems:
                found.setdefault(problem, rank)
        if self.ranks == 1:
            return list(found)
        return [f"{problem} (rank {rank})" for problem, rank in found.items()]

    def most(self, *values: int) -> list[int]:
        """The highest of each value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()
