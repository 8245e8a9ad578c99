"""A communication ledger that refuses what a cluster would: sizes of one rank that do not go together.

    all_gather       output = ranks x input, elements
    reduce_scatter   input = ranks x output
    all_to_all       rows to all ranks = rows of the input, rows from all = rows of the output; equal parts divide

NCCL answers such a call with an error, gloo by ending the process, and the fake backend not at all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

from titan5d.metrics.interception import Interception, tensors_in
from titan5d.metrics.ledger import CommunicationLedger

CHECKED = {
    # methods of ProcessGroup -> which of (output, input) is that of all ranks
    "all_gather_single": 0,
    "_allgather_base": 0,
    "reduce_scatter_single": 1,
    "_reduce_scatter_base": 1,
    "all_to_all_single": None,
    "alltoall_base": None,
}


class CheckedLedger(CommunicationLedger):
    """Raises ValueError where a collective is called with sizes that do not go together."""

    def __enter__(self) -> CheckedLedger:
        super().__enter__()
        self._checks = Interception()
        for name, whole in CHECKED.items():
            self._checks.replace(dist.ProcessGroup, name, partial(_checked, whole))
        return self

    def __exit__(self, *error: Any) -> None:
        self._checks.undo()
        super().__exit__(*error)


def _checked(whole: int | None, original: Any) -> Any:
    def method(group: dist.ProcessGroup, output: Any, input: Any, *rest: Any, **kwargs: Any) -> Any:
        if whole is None:
            splits = [part for part in rest if isinstance(part, list | tuple)]
            _check_rows("output", output, splits[0] if splits else [], group)
            _check_rows("input", input, splits[1] if len(splits) > 1 else [], group)
        else:
            all_ranks, one_rank = (input, output) if whole else (output, input)
            _check_shares(all_ranks, one_rank, whole, group)
        return original(group, output, input, *rest, **kwargs)

    return method


def _check_shares(all_ranks: Any, one_rank: Any, whole: int, group: dist.ProcessGroup) -> None:
    many = sum(tensor.numel() for tensor in tensors_in(all_ranks))
    few = sum(tensor.numel() for tensor in tensors_in(one_rank))
    if many != few * group.size():
        sides = ("input", "output") if whole else ("output", "input")
        op = "reduce_scatter" if whole else "all_gather"
        raise ValueError(
            f"{op} over {group.size()} ranks: {many:,} elements of {sides[0]} {_shapes(all_ranks)} are not"
            f" {group.size()} x the {few:,} of {sides[1]} {_shapes(one_rank)}"
        )


def _check_rows(side: str, tensor: Any, splits: Any, group: dist.ProcessGroup) -> None:
    (tensor,) = tensors_in(tensor)
    rows = tensor.shape[0]
    if splits and (sum(splits) != rows or len(splits) != group.size()):
        raise ValueError(
            f"all_to_all over {group.size()} ranks: {len(splits)} parts of in all {sum(splits)} rows, but the {side}"
            f" {_shapes(tensor)} has {rows}"
        )
    if not splits and rows % group.size():
        raise ValueError(
            f"all_to_all over {group.size()} ranks: the {rows} rows of the {side} {_shapes(tensor)} do not divide into"
            f" {group.size()} equal parts"
        )


def _shapes(value: Any) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(value))
