"""The [model] section -> ModelArgs. Pure Python: a wrong name is refused without importing torch."""

from __future__ import annotations

from dataclasses import asdict

from titan5d.config.load import ConfigError
from titan5d.config.schema import Model
from titan5d.models import llama3
from titan5d.models.args import ModelArgs

FLAVORS: dict[str, dict[str, ModelArgs]] = {"llama3": llama3.FLAVORS}
"""Family -> flavor -> sizes."""

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
)
"""Keys of [model] that override the flavor's value."""


def model_args(model: Model) -> ModelArgs:
    """The sizes of the flavor with the section's own values over them.

    Raises ConfigError naming the families or flavors there are.
    """
    if model.name not in FLAVORS:
        raise ConfigError([f"model.name = {model.name!r}: no such family; there are: {', '.join(FLAVORS)}"])
    flavors = FLAVORS[model.name]
    if model.flavor not in flavors:
        raise ConfigError(
            [
                f"model.flavor = {model.flavor!r}: {model.name} has no such flavor; there are: {', '.join(flavors)}"
            ]
        )
    given = asdict(model)
    return flavors[model.flavor].with_overrides(**{name: given[name] for name in SIZES})
