"""Looking into torch.distributed from outside: methods of its classes are wrapped for a while, then put back.

The ledger (how many bytes), the exposed time (how long a step stood still) and the flight recorder (who waits where)
all watch the same methods of ProcessGroup. Users may overlap, the last to begin being the first to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

GROUP_METHODS: dict[str, tuple[str, int | None]] = {
    # methods of ProcessGroup -> op, and which of their arguments is the payload
    "all_gather_single": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "alltoall": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "barrier": ("barrier", None),
}
"""Names differ between torch versions: those that one lacks are passed over."""


class Interception:
    """Methods of classes that are replaced until `undo`."""

    def __init__(self) -> None:
        self._originals: list[tuple[type, str, Any]] = []

    def replace(self, owner: type, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
        """Puts `wrap(original)` in the place of a method, if the class has it. `original(self, ...)` calls it."""
        # As it stands in the class: what getattr returns for a C++ method would not bind when put back.
        original = owner.__dict__.get(name)
        if original is not None:
            self._originals.append((owner, name, original))
            setattr(owner, name, wrap(original))

    def undo(self) -> None:
        """Puts all of them back."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
        return
    for part in value:
        yield from tensors_in(part)
