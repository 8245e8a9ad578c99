"""Bytes of narrow moments and of Muon's state against what optimizers really hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.plan.planning import case_with, config_with
from titan5d.models.decoder import Decoder
from titan5d.models.families import model_args
from titan5d.plan.parts import rank_parts
from titan5d.plan.rank_memory import rank_state
from titan5d.train.optimizer import build_optimizer

DENSE = {
    "model.dim": 128,
    "model.n_layers": 2,
    "model.n_heads": 8,
    "model.n_kv_heads": 4,
    "model.head_dim": 16,
    "model.ffn_dim": 256,
    "model.vocab_size": 320,
}
EXPERTS = DENSE | {
    "model.name": "mixtral",
    "model.n_experts": 4,
    "model.top_k": 2,
    "model.moe_ffn_dim": 64,
    "model.n_shared_experts": 1,
}
LATENT = {"model.name": "deepseek_v3", "model.flavor": "debug"}


def held_bytes(keys: dict[str, Any]) -> int:
    """Of all tensors in the state of an optimizer after an update of the whole model, its counters left out."""
    config = config_with(keys)
    with torch.device("cpu"):
        model = Decoder(model_args(config.model, config.moe))
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    if hasattr(optimizer, "_new_buffer"):  # an update would be compiled; what it would begin with is enough
        moments = [optimizer._new_buffer(p, signed) for p in model.parameters() for signed in (True, False)]
        return sum(map(_bytes, moments))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(_bytes(value) for value in values if isinstance(value, Tensor) and value.ndim)


def _bytes(tensor: Tensor) -> int:
    parts = [getattr(tensor, name) for name in ("codes", "scale", "qmap") if hasattr(tensor, name)]
    return sum(part.nbytes for part in parts or [tensor])


def planned_bytes(keys: dict[str, Any]) -> float:
    case = case_with(1, {"training.global_batch_size": 8} | keys)
    return rank_state(case, rank_parts(case, 0), 0).optimizer


@pytest.mark.parametrize("state_dtype", ["int8", "float8", "int4"])
@pytest.mark.parametrize("model", [DENSE, EXPERTS, LATENT], ids=["dense", "experts", "latent"])
def test_narrow_moments_are_exact(model: dict[str, Any], state_dtype: str) -> None:
    pytest.importorskip("torchao", reason="the [ao] extra is not installed")
    keys = model | {"optimizer.state_dtype": state_dtype}
    held = held_bytes(keys)
    assert planned_bytes(keys) == held
    assert held < 0.4 * planned_bytes(model)


@pytest.mark.parametrize("model", [DENSE, EXPERTS, LATENT], ids=["dense", "experts", "latent"])
def test_muon_is_exact(model: dict[str, Any]) -> None:
    keys = model | {"optimizer.name": "Muon"}
    assert planned_bytes(keys) == held_bytes(keys)
    assert planned_bytes(keys) < planned_bytes(model)


def test_shards_below_4096_values_stay_wide() -> None:
    keys = DENSE | {"optimizer.state_dtype": "int8", "training.global_batch_size": 512}
    few, many = (case_with(ranks, keys) for ranks in (2, 64))
    each = [rank_state(case, rank_parts(case, 0), 0).optimizer * case.shards for case in (few, many)]
    parameters = sum(p.numel() for p in _model(keys).parameters())
    assert each[0] < 2.5 * parameters  # most are narrow
    assert each[1] >= 8 * parameters  # none is


def _model(keys: dict[str, Any]) -> nn.Module:
    config = config_with(keys)
    with torch.device("meta"):
        return Decoder(model_args(config.model, config.moe))
