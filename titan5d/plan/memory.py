"""Bytes one rank holds: training state, gathered units, activations, logits. Closed forms, pure Python.

Training state per parameter, 16 bytes in fp32 (weights 4, gradients 4, Adam 4 + 4), cut over N ranks by stage:

    stage   weights   gradients   optimizer
      0        1          1           1          bf16 compute adds a gathered bf16 copy
      1        1/N        1           1/N        FSDP2: weights are sharded between steps, gathered within
      2        1/N        1/N         1/N
      3        1/N        1/N         1/N        and only a few units are gathered at a time

Within a step, stages 1 and 2 hold the gathered weights of all units, stage 3 those of two units at a time (the one in
use and the one fetched ahead). Gathered copies have the compute type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan5d.models.args import ModelArgs


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank at the fullest moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.gathered


def state_bytes(
    parameters: int,
    largest_unit: int,
    stage: int,
    shards: int,
    param_bytes: int = 4,
    compute_bytes: int = 4,
    optimizer_bytes: int = 8,
) -> StateBytes:
    """Training state of `parameters` elements sharded over `shards` ranks.

    Args:
        parameters: elements this rank's group shares (all of the model without tensor or pipeline cuts).
        largest_unit: elements of the largest unit gathered at once.
        param_bytes, compute_bytes: per element as stored, as gathered.
        optimizer_bytes: per element; 8 for Adam, 4 for SGD with momentum or Muon, 0 for plain SGD.
    """
    cut = parameters / shards
    stored = parameters if stage == 0 else cut
    whole_gradients = 4 if compute_bytes < 4 else param_bytes  # accumulated in the reduce type
    if stage == 0:
        # replicated parameters in the type they are stored in need no second copy
        gathered = parameters * compute_bytes if compute_bytes != param_bytes else 0
    elif shards == 1 and compute_bytes == param_bytes:
        gathered = 0
    else:
        gathered = compute_bytes * (parameters if stage <= 2 else min(parameters, 2 * largest_unit))
    return StateBytes(
        weights=stored * param_bytes,
        gradients=parameters * whole_gradients
        if stage <= 1
        else cut * param_bytes + largest_unit * whole_gradients,
        optimizer=stored * optimizer_bytes,
        gathered=gathered,
    )


def layer_activation_bytes(args: ModelArgs, tokens: int, element_bytes: int, recompute: str) -> float:
    """What one block keeps for backward, for `tokens` tokens of one micro-batch.

    Source: A1 = T (8h + 4 n_h d + 4 n_kv d + 8f + 4 n_h) bytes in bf16 for SwiGLU, GQA, flash attention (with the fp32
    log-sum-exp as the last term); full recompute keeps the block's input only.
    """
    heads = args.n_heads * args.head_dim
    kv = args.n_kv_heads * args.head_dim
    if recompute == "full":
        return tokens * args.dim * element_bytes
    half = element_bytes / 2
    products = tokens * half * (4 * args.dim + 2 * heads + 4 * kv + 4 * args.ffn_dim)
    if recompute == "selective":
        return products
    return tokens * (half * (8 * args.dim + 4 * heads + 4 * kv + 8 * args.ffn_dim) + 4 * args.n_heads)
