"""Rules of low precision: 8-bit products (model.converters, quantize.*) and optimizer state; called by check.py."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable

from titan5d.config.schema import Config
from titan5d.topology import Topology

FLOAT8, MX = "quantize.linear.float8", "quantize.linear.mx"
MX_RECIPES = ("mxfp8_cublas", "mxfp8_emulated")


def precision_problems(config: Config) -> list[str]:
    """What cannot work in any layout."""
    problems = []
    converters, optimizer = config.model.converters, config.optimizer
    known = {FLOAT8, MX}
    problems += [
        f'model.converters has "{one}"; there are "{FLOAT8}" and "{MX}"'
        for one in converters
        if one not in known
    ]
    if known <= set(converters):
        problems.append(f"model.converters = {converters}: a layer computes in one of the two; keep one")
    if MX in converters and config.quantize.linear.mx.recipe_name not in MX_RECIPES:
        problems.append(
            f"quantize.linear.mx.recipe_name = {config.quantize.linear.mx.recipe_name!r}; there are"
            f" {' and '.join(map(repr, MX_RECIPES))}"
        )
    narrow = optimizer.state_dtype != "float32"
    if narrow and optimizer.name not in ("AdamW", "Adam"):
        problems.append(
            f"optimizer.state_dtype = {optimizer.state_dtype!r} is for AdamW and Adam, and optimizer.name ="
            f" {optimizer.name!r}; leave it out, or use AdamW"
        )
    if (known & set(converters) or narrow) and importlib.util.find_spec("torchao") is None:
        key = (
            f"optimizer.state_dtype = {optimizer.state_dtype!r}"
            if narrow
            else f"model.converters = {converters}"
        )
        problems.append(
            f"{key} needs torchao, which is not installed: pip install -c constraints.txt -e .[ao]"
        )
    float8 = config.quantize.linear.float8
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        problems.append(
            f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp = true belongs to enable_fsdp_float8_all_gather, which"
            " is false; set both or none"
        )
    if float8.enable_fsdp_float8_all_gather and float8.recipe_name not in (None, "tensorwise"):
        problems.append(
            f"{FLOAT8}.enable_fsdp_float8_all_gather = true gathers weights with one scale each, but recipe_name ="
            f" {float8.recipe_name!r} wants one for each row of the whole weight; use 'tensorwise', or gather in bf16"
        )
    return problems


def filter_problems(config: Config, names: Iterable[str]) -> list[str]:
    """Filters that fit no part of the model, and so would leave nothing out. names: of all parameters."""
    linear, problems = config.quantize.linear, []
    names = [*names, "output.weight"]  # the head is there even where it shares its matrix
    for key, filters in ((FLOAT8, linear.float8.filter_fqns), (MX, linear.mx.filter_fqns)):
        if key not in config.model.converters:
            continue
        for one in filters:
            if not any(one in name for name in names):
                near = difflib.get_close_matches(one, {part for name in names for part in name.split(".")}, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                problems.append(
                    f"{key}.filter_fqns has {one!r}, which is part of no name in this model; {hint}names look like"
                    " layers.0.attention.wq"
                )
    return problems


def layout_precision_problems(
    config: Config, topology: Topology, zero_stage: int, splits_backward: bool
) -> list[str]:
    """What cannot work in this layout. splits_backward: the pipeline's schedule makes weight gradients apart."""
    converters = config.model.converters
    problems: list[str] = []
    if not converters:
        return problems
    if topology.tp > 1:
        problems.append(
            f"model.converters = {converters} with parallelism.tensor_parallel_degree = {topology.tp}: tensor ranks"
            " multiply slices of weights inside operators of their own, which torchao's layers do not reach; use 1"
            " (data, context, pipeline and expert ranks go with 8-bit products)"
        )
    if splits_backward:
        problems.append(
            f"model.converters = {converters} with parallelism.pipeline_parallel_schedule ="
            f" {config.parallelism.pipeline_parallel_schedule!r}: it computes gradients of weights apart from backward,"
            " which torchao's layers cannot; use 1F1B, Interleaved1F1B, GPipe or LoopedBFS"
        )
    par = config.parallelism
    rows = config.training.local_batch_size if topology.pp == 1 else par.pipeline_parallel_microbatch_size
    tokens, multiple = rows * config.training.seq_len // topology.cp, 32 if MX in converters else 16
    if tokens % multiple:
        problems.append(
            f"model.converters = {converters}: gradients of weights are products over the tokens of a micro-batch,"
            f" {rows} rows x training.seq_len {config.training.seq_len} / context_parallel_degree {topology.cp} ="
            f" {tokens}, which must be a multiple of {multiple}"
        )
    gathers = FLOAT8 in converters and config.quantize.linear.float8.enable_fsdp_float8_all_gather
    if gathers and (zero_stage == 0 or topology.dp_shard * topology.cp == 1):
        problems.append(
            f"{FLOAT8}.enable_fsdp_float8_all_gather = true, but nothing is gathered: zero_stage = {zero_stage} and"
            f" data_parallel_shard_degree x context_parallel_degree = {topology.dp_shard * topology.cp}; leave it out,"
            " or shard over at least 2 ranks"
        )
    return problems
