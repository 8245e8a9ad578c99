"""The optimizer: which rule steps which parameter, and which parameters decay.

Decayed are the matrices: attention, feed-forward, experts, router, embedding and head. Never decayed are norms and
biases, which have no scale to keep small. (The embedding decays as in the Llama and GPT recipes.)

AdamW decays apart from the gradient (W <- W - lr wd W), Adam and SGD add wd W to the gradient, as torch has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan5d.train.adam import Adam, AdamW
from titan5d.train.muon import Muon
from titan5d.train.narrow_state import narrow_adam

MUON_MOMENTUM = 0.95
"""Jordan's value, taken when the config leaves `momentum` at 0: Muon without momentum is no known method."""


class OptimizerConfig(Protocol):
    """What is read of the [optimizer] section."""

    name: Literal["AdamW", "Adam", "SGD", "Muon"]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    state_dtype: Literal["float32", "int8", "float8", "int4"]
    implementation: Literal["for-loop", "foreach", "fused"]


def build_optimizer(
    named_params: Iterable[tuple[str, Tensor]],
    config: OptimizerConfig,
    orthogonalize_dtype: torch.dtype = torch.bfloat16,
) -> torch.optim.Optimizer:
    """Builds the optimizer of the parameters this rank holds, plain tensors or DTensors of any mesh.

    `named_params` comes from all model parts of this rank (pipeline stages keep global names). The groups carry the
    names under `param_names`, so that state can be saved by name, whatever the cut.

    Args:
        orthogonalize_dtype: Muon only: type of its products; pass float32 for a run that computes in float32.
    """
    decayed, kept, matrices = [], [], []
    for name, param in named_params:
        if not param.requires_grad:
            continue
        if not is_decayed(name, param):
            kept.append((name, param))
        elif config.name == "Muon" and is_hidden_matrix(name, param):
            matrices.append((name, param))
        else:
            decayed.append((name, param))
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    if config.name == "Muon":
        groups.append({"params": matrices, "weight_decay": config.weight_decay, "orthogonalize": True})
    # torch's updates of many parameters at once take plain tensors or DTensors, not both: a router is a DTensor, while
    # the rest may be whole. A middle pipeline stage has no embedding.
    groups = [group | {"params": part} for group in groups for part in _kinds(group["params"]) if part]

    foreach = config.implementation == "foreach"
    fused = config.implementation == "fused"
    betas = (config.beta1, config.beta2)
    if config.state_dtype != "float32":
        return narrow_adam(groups, config.name == "AdamW", config.state_dtype, config.lr, betas, config.eps)
    if config.name == "AdamW":
        return AdamW(groups, config.lr, betas, config.eps, foreach=foreach, fused=fused)
    if config.name == "Adam":
        return Adam(groups, config.lr, betas, config.eps, foreach=foreach, fused=fused)
    if config.name == "SGD":
        if fused and any(isinstance(param, DTensor) for group in groups for _, param in group["params"]):
            # torch has no fused SGD for sharded parameters; foreach computes the same
            foreach, fused = True, False
        return torch.optim.SGD(groups, config.lr, config.momentum, foreach=foreach, fused=fused)
    return Muon(
        groups,
        config.lr,
        betas,
        config.eps,
        config.weight_decay,
        config.momentum or MUON_MOMENTUM,
        orthogonalize_dtype,
        foreach=foreach,
        fused=fused,
    )


def _kinds(params: list[tuple[str, Tensor]]) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Plain tensors, DTensors."""
    plain = [(name, param) for name, param in params if not isinstance(param, DTensor)]
    return plain, [(name, param) for name, param in params if isinstance(param, DTensor)]


def is_decayed(name: str, param: Tensor) -> bool:
    """Matrices and stacks of matrices are, norms and biases (also those of a stack of experts) are not."""
    return param.ndim >= 2 and not name.endswith("bias")


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """Whether Muon steps it: a matrix inside the blocks. Embedding and head are AdamW's (Jordan 2024)."""
    return param.ndim >= 2 and not {"tok_embeddings", "output"} & set(name.split("."))
