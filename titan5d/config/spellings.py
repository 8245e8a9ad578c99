"""Older spellings of the field's TOML keys, understood with a note.

One table of moves; what an old key cannot say in the new words is refused by the schema under its old name.
"""

from __future__ import annotations

from typing import Any

MOVED = {
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "training.compile": "compile.enable",
    "float8": "quantize.linear.float8",
    "mx": "quantize.linear.mx",
    "profiling.save_trace_folder": "profiling.save_traces_folder",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.deterministic": "debug.deterministic",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "model.tokenizer": "model.tokenizer_path",
    "job.print_args": "job.print_config",
}
"""Old dotted path -> new dotted path; a whole section may move."""

CONVERTERS = {"float8": "quantize.linear.float8", "mx": "quantize.linear.mx"}
"""Old -> new names in model.converters."""

FLAVORS = {"debugmodel": "debug", "debug_model": "debug", "debugmodel_moe": "debug_moe"}
"""Old -> new names of model flavors."""


def modern_spellings(table: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Returns the table with every old spelling moved to the new one, and one note for each."""
    for old, new in MOVED.items():
        found, value = _take(table, old.split("."))
        if found:
            notes.append(f"{old} is now called {new}")
            _put(table, new.split("."), value)
    model = table.get("model")
    if isinstance(model, dict):
        if isinstance(model.get("converters"), list):
            for old in set(model["converters"]) & set(CONVERTERS):
                notes.append(f'model.converters = ["{old}"] is now called "{CONVERTERS[old]}"')
            model["converters"] = [CONVERTERS.get(one, one) for one in model["converters"]]
        if model.get("flavor") in FLAVORS:
            model["flavor"] = FLAVORS[model["flavor"]]
        if "hf_assets_path" in model and "tokenizer_path" not in model:
            model["tokenizer_path"] = model["hf_assets_path"]
    _dashes(table, notes)
    return table


def _dashes(table: dict[str, Any], notes: list[str]) -> None:
    """TorchTitan's command line also takes dashes for underscores, and so do flags here."""
    for key in list(table):
        value = table[key]
        if "-" in key:
            table[key.replace("-", "_")] = table.pop(key)
        if isinstance(value, dict):
            _dashes(value, notes)


def _take(table: dict[str, Any], keys: list[str]) -> tuple[bool, Any]:
    for key in keys[:-1]:
        below = table.get(key)
        if not isinstance(below, dict):
            return False, None
        table = below
    if keys[-1] not in table:
        return False, None
    return True, table.pop(keys[-1])


def _put(table: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        table = table.setdefault(key, {})
    if isinstance(value, dict) and isinstance(table.get(keys[-1]), dict):
        value = {**value, **table[keys[-1]]}
    table[keys[-1]] = value
