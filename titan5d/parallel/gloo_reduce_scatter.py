"""FSDP2's reduce-scatter on CPU ranks. gloo's own is an all-reduce of which most is thrown away.

    piece 2 of three:   rank 0 --its own--> rank 1 --+ its own--> rank 2, its owner, adds its own

A ring: each piece goes once around to its owner, and every rank adds its own on the way; in each of the n - 1 turns all
ranks send to the next one. That is (n - 1) / n of the input a rank, where the all-reduce sends twice that. No memory is
needed but the output's: what arrives lands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan5d.parallel.attention_op import group_named


class GlooReduceScatter:
    """What FSDP2 calls (interface ReduceScatter of torch.distributed.fsdp) in place of torch's reduce-scatter."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for an input or output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """See `reduce_scatter`. Raises ValueError for anything but a sum that is waited for."""
        if op != dist.ReduceOp.SUM or async_op:
            raise ValueError(f"only a sum, and only with async_op = False; not {op}, async_op = {async_op}")
        reduce_scatter(output_tensor, input_tensor, group.group_name)


# An operator, so that ledgers see one reduce-scatter rather than its messages.


@torch.library.custom_op("titan5d::reduce_scatter", mutates_args=("output", "input"))
def reduce_scatter(output: Tensor, input: Tensor, group_name: str) -> None:
    """output (N,) = the sum over the n ranks of the r-th pieces of their inputs (n N,), r being this rank.

    The input is overwritten.
    """
    group = group_named(group_name)
    rank, ranks = group.rank(), group.size()
    pieces = input.view(ranks, -1).unbind()
    for turn in range(1, ranks):
        works = [
            dist.isend(pieces[rank - turn], group=group, group_dst=(rank + 1) % ranks),
            dist.irecv(output, group=group, group_src=(rank - 1) % ranks),
        ]
        for work in works:
            assert work is not None
            work.wait()
        if turn < ranks - 1:
            pieces[rank - turn - 1].add_(output)
    output.add_(pieces[rank])
