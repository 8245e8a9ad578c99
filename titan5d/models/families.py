"""The [model] and [moe] sections -> ModelArgs. Pure Python: a wrong name is refused without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from titan5d.config.load import ConfigError
from titan5d.config.schema import MixtureOfExperts, Model
from titan5d.models import deepseek_v3, llama3, mixtral, qwen3
from titan5d.models.args import Balance, ModelArgs


class Family(Protocol):
    """What the file of a family offers."""

    @property
    def FLAVORS(self) -> dict[str, ModelArgs]:
        """Flavor -> sizes."""
        ...

    def hf_name_map(self, args: ModelArgs) -> Mapping[str, str | tuple[str, ...]]:
        """Our name -> Hugging Face's, or one an expert (hf_names.py)."""
        ...

    def to_hf_config(self, args: ModelArgs) -> dict[str, Any]:
        """The fields of a `config.json`."""
        ...

    def from_hf_config(self, config: Mapping[str, Any]) -> ModelArgs:
        """The sizes in a `config.json`."""
        ...


FAMILIES: dict[str, Family] = {
    "llama3": llama3,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "deepseek_v3": deepseek_v3,
}

SIZES = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "ffn_dim",
    "vocab_size",
    "norm_eps",
    "rope_theta",
    "tie_embeddings",
    "max_seq_len",
    "qk_norm",
    "n_experts",
    "top_k",
    "moe_ffn_dim",
    "n_shared_experts",
    "n_dense_layers",
    "router_score",
    "router_normalize",
    "router_scale",
    "n_expert_groups",
    "n_limited_groups",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
"""Keys of [model] that override the flavor's value."""


def model_args(
    model: Model, moe: MixtureOfExperts | None = None, force_load_balance: bool = False
) -> ModelArgs:
    """The sizes of the flavor with the section's own values over them, and how its experts are balanced.

    Raises ConfigError naming the families or flavors there are.
    """
    if model.name not in FAMILIES:
        raise ConfigError([f"model.name = {model.name!r}: no such family; there are: {', '.join(FAMILIES)}"])
    flavors = FAMILIES[model.name].FLAVORS
    if model.flavor not in flavors:
        raise ConfigError(
            [f"model.flavor = {model.flavor!r}: {model.name} has no such flavor; there are: {', '.join(flavors)}"]
        )
    given = asdict(model)
    balance = Balance(**asdict(moe or MixtureOfExperts()), force_load_balance=force_load_balance)
    return flavors[model.flavor].with_overrides(**{name: given[name] for name in SIZES}, balance=balance)
