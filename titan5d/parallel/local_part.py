"""Between a DTensor and the part of it that is on this rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement


def local_part(tensor: Tensor | None) -> Tensor:
    """This rank's part of a tensor that is there; of a plain one, all of it."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed(part: Tensor, like: DTensor, placements: Sequence[Placement] | None = None) -> DTensor:
    """The DTensor, as large as `like` and on its mesh, of which this rank has `part`; placements: None = as `like`."""
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements if placements is None else placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
