"""A layout that was found, as a TOML to train with: only the keys that differ from their defaults, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import tomli_w

from titan5d.config.schema import Config
from titan5d.plan.predict import Prediction
from titan5d.plan.quantities import gib


def layout_toml(config: Config, prediction: Prediction, title: str) -> str:
    """The text of the file. Data set, tokenizer and optimizer are the config's; a line says to look at them."""
    case, machine = prediction.case, prediction.machine
    head = [
        f"# {title} as found by `titan5d plan --search`.",
        f"# Hardware: {machine.gpus} x {machine.device.name}",
        f"# Predicted: {prediction.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {prediction.mfu:.1%},"
        f" {gib(prediction.fullest.total)} of {gib(machine.device.memory)} a GPU.",
        f"# Layout: {case.topology}; {case.microbatches} micro-batches of {case.rows} rows a step.",
        "# Data, tokenizer, learning rate and steps are not the planner's to choose: set them before you train.",
        "",
    ]
    changed = _differing(asdict(config), asdict(Config()))
    changed.get("job", {}).pop("config_file", None)
    changed.setdefault("parallelism", {})["data_parallel_shard_degree"] = case.topology.dp_shard
    return "\n".join(head) + tomli_w.dumps({name: table for name, table in changed.items() if table})


def _differing(table: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The entries that are not the default's; None, which TOML has no word for, is always the default's."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            if inner := _differing(value, defaults[key]):
                found[key] = inner
        elif value != defaults[key] and value is not None:
            found[key] = value
    return found
