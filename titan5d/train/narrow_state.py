"""Adam and AdamW whose moments are kept in 8 or 4 bits, through torchao (Dettmers et al. 2022, arXiv:2110.02861).

    moment    [ x x x x ... | x x x x ... | ... ]    blocks of 256 values (int4: 128), each with a scale of its own;
                                                     an update widens, computes in fp32 and narrows again

                  bytes of both moments a parameter
    float32       8
    int8          2 + 2 x 4/256 = 2.03
    float8        the same
    int4          1 + 2 x 4/128 = 1.06

Tensors of fewer than 4,096 values on a rank, or of a number that blocks do not divide, are kept as the weights are.

A checkpoint holds moments widened to fp32, so it can be continued on any layout and with any `state_dtype`. Loading
narrows them again: on the same layout that changes nothing with float8; with int8 and int4, whose codes do not reach
the largest negative value exactly, values move by at most a code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titan5d.parallel.local_part import local_part

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Name -> whether it has a sign."""


def narrow_adam(
    groups: list[dict[str, Any]],
    decoupled_decay: bool,
    state_dtype: str,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """AdamW (`decoupled_decay`) or Adam with moments in `state_dtype`: int8, float8 or int4."""
    import torch._functorch.config
    import torch._inductor.config
    from torchao import optim

    kinds = {
        "int8": (optim.Adam8bit, optim.AdamW8bit),
        "float8": (optim.AdamFp8, optim.AdamWFp8),
        "int4": (optim.Adam4bit, optim.AdamW4bit),
    }
    kind: Any = kinds[state_dtype][decoupled_decay]

    class NarrowAdam(kind):
        """torchao's update, compiled anew by each process: torch's caches of compiled graphs go by the global shapes of
        DTensors, and so would hand a rank the graph of another whose slice has one row more."""

        def step(self, closure: Any = None) -> Any:
            inductor, functorch = torch._inductor.config, torch._functorch.config
            with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
                return super().step(closure)

    built: torch.optim.Optimizer = NarrowAdam(groups, lr=lr, betas=betas, eps=eps)
    return built


def is_narrow(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` keeps narrow moments."""
    return hasattr(optimizer, "_new_buffer")


def widened(local: Tensor) -> Tensor:
    """A narrow tensor in fp32; any other as it is."""
    return local.dequantize().float() if hasattr(local, "codes") else local


@torch.no_grad()
def narrow_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives moments that were loaded in fp32 the form the optimizer keeps them in."""
    if not is_narrow(optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for field, signed in MOMENTS.items():
                if field in state:
                    kept = optimizer._new_buffer(parameter, signed)  # type: ignore[attr-defined]
                    local_part(kept).copy_(local_part(state[field]))
                    state[field] = kept
