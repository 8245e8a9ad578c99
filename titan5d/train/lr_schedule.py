r"""The learning rate of every step: linear warmup, a stable stretch, a decay. A pure function of the step's number.

    factor
      1 |      _______________
        |     /               \
        |    /                  \     linear, sqrt or cosine
    min |. ./. . . . . . . . . . .\ .
        |  /                      :
        +-----------------------------> step
          0   W          T+1-D    T+1

Steps are counted from 1, as they are logged: step n is the n-th update of the weights. With W warmup steps, D decay
steps and T steps in all,

    step n <= W           n / W                 no update is made at rate 0; step W is the first at full rate
    step n <= T + 1 - D   1
    else                  m + (1 - m) d(p),  p = (n - (T + 1 - D)) / D

where d falls from d(0) = 1 to d(1) = 0 and m is min_lr_factor. p would reach 1 at step T + 1: the decay ends one step
behind the run, so that the last update is not wasted on a rate of exactly zero. The rule is TorchTitan's.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

DecayType = Literal["linear", "sqrt", "cosine"]


class LRConfig(Protocol):
    """What is read of the [lr_scheduler] section."""

    warmup_steps: int
    total_steps: int | None
    decay_ratio: float | None
    decay_type: DecayType
    min_lr_factor: float


def decay_steps(total_steps: int, warmup_steps: int, decay_ratio: float | None) -> int:
    """How many of the `total_steps` decay: all after the warmup, or `decay_ratio` of the total (WSD).

    A share that reaches into the warmup is cut to what the warmup leaves.
    """
    left = max(total_steps - warmup_steps, 0)
    return left if decay_ratio is None else min(round(total_steps * decay_ratio), left)


def lr_factor(
    step: int,
    total_steps: int,
    warmup_steps: int = 0,
    decay_ratio: float | None = None,
    decay_type: DecayType = "linear",
    min_lr_factor: float = 0.0,
) -> float:
    """The share of the peak learning rate that step number `step` (1, 2, ... total_steps) is made with.

    Step 0, before any update, is 0 under a warmup. Steps behind `total_steps` stay at `min_lr_factor`. A warmup
    longer than the run never ends: a run cut short then sees the same first rates as the long one.

    Args:
        decay_ratio: share of the steps that decay at the end; None = the decay begins right after the warmup.
        decay_type: with progress p in [0, 1], linear = 1 - p, sqrt = 1 - sqrt(p) (arXiv:2405.18392, section 3),
            cosine = (1 + cos(pi p)) / 2.
        min_lr_factor: where the decay ends.
    """
    if step < warmup_steps:
        return step / warmup_steps
    decaying = decay_steps(total_steps, warmup_steps, decay_ratio)
    last_at_full_rate = total_steps + 1 - decaying
    if decaying == 0 or step <= last_at_full_rate:
        return 1.0
    progress = min((step - last_at_full_rate) / decaying, 1.0)
    if decay_type == "linear":
        shape = 1.0 - progress
    elif decay_type == "sqrt":
        shape = 1.0 - math.sqrt(progress)
    else:
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr_factor + (1.0 - min_lr_factor) * shape


class LRSchedule:
    """Sets the learning rates of an optimizer's groups: each group's own peak times the factor of the step.

    The peaks are those the optimizer is built with, so a continued run follows its config, not rates that were saved.

    Attributes:
        step: the step whose rates are set; 1 after construction. It is the whole state.
        factor: the share of the peak at that step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: LRConfig, training_steps: int) -> None:
        self.total_steps = config.total_steps if config.total_steps is not None else training_steps
        self._config = config
        self._optimizer = optimizer
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self.set_step(1)

    def set_step(self, step: int) -> None:
        """Call before optimizer step number `step` (counted from 1)."""
        config = self._config
        self.step = step
        self.factor = lr_factor(
            step,
            self.total_steps,
            config.warmup_steps,
            config.decay_ratio,
            config.decay_type,
            config.min_lr_factor,
        )
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            if isinstance(group["lr"], Tensor):  # a compiled update reads the rate from memory
                group["lr"].fill_(peak * self.factor)
            else:
                group["lr"] = peak * self.factor

    @property
    def lr(self) -> float:
        """The rate now set, for the log; groups differ in weight decay only, so the first speaks for all."""
        return float(self._optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set_step(int(state["step"]))
