"""Every rule of config/check.py: what is refused, and what the message says.

Rules of the tensor cut: test_check_tensor.py; of the pipeline: test_pipeline_plan.py; of the model's sizes:
tests/models/test_args.py; keys that are not there: test_unavailable.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from titan5d.config.check import Layout, check, context_method, leaves_zero_stage_open
from titan5d.config.load import ConfigError
from titan5d.config.schema import Config
from titan5d.models.args import ModelArgs
from titan5d.topology import Topology

ARGS = ModelArgs(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=256)
Keys = dict[str, object]


def config_with(keys: Keys) -> Config:
    config = Config()
    config.training.seq_len = 64
    for path, value in keys.items():
        *sections, name = path.split(".")
        section: object = config
        for part in sections:
            section = getattr(section, part)
        assert hasattr(section, name), path
        setattr(section, name, value)
    return config


def checked(keys: Keys, world: int = 1, args: ModelArgs = ARGS) -> Layout:
    return check(config_with(keys), args, world)


def problems(keys: Keys, world: int = 1, args: ModelArgs = ARGS) -> list[str]:
    with pytest.raises(ConfigError) as error:
        checked(keys, world, args)
    return error.value.problems


PAR, DP, TRAIN = "parallelism.", "parallelism.data_parallel_", "training."
BATCH = {TRAIN + "local_batch_size": 4}

# (keys, ranks, what the one message must hold: the key, the numbers, what would work)
REFUSED: dict[str, tuple[Keys, int, list[str]]] = {
    # degrees and ranks (case 085)
    "tensor 3 on 4 ranks": (
        {PAR + "tensor_parallel_degree": 3},
        4,
        ["tensor_parallel_degree 3", "= 3", "4 ranks", "use a multiple of 3 ranks or smaller degrees"],
    ),
    "shard 2 on 4 ranks": (
        {DP + "shard_degree": 2},
        4,
        [
            "data_parallel_shard_degree 2",
            "= 2",
            "4 ranks",
            "start 2 ranks",
            "data_parallel_shard_degree = -1",
        ],
    ),
    "replicas -1 and shards -1": (
        {DP + "replicate_degree": -1, DP + "shard_degree": -1},
        4,
        ["data_parallel_replicate_degree = -1", "only data_parallel_shard_degree may be -1"],
    ),
    "shard 0": ({DP + "shard_degree": 0}, 4, ["data_parallel_shard_degree = 0", "1 or more"]),
    "all degrees below 1": (
        {PAR + "tensor_parallel_degree": 0, PAR + "pipeline_parallel_degree": -2},
        4,
        ["tensor_parallel_degree = 0", "pipeline_parallel_degree = -2", "1 or more"],
    ),
    "2 x 2 x 2 on 4 ranks": (
        {PAR + f"{cut}_parallel_degree": 2 for cut in ("tensor", "context", "pipeline")},
        4,
        [
            "tensor_parallel_degree 2",
            "context_parallel_degree 2",
            "pipeline_parallel_degree 2",
            "= 8",
            "4 ranks",
        ],
    ),
    # batch
    "batch 10 by 4 x 2": (
        {**BATCH, TRAIN + "global_batch_size": 10},
        2,
        ["global_batch_size = 10", "local_batch_size 4", "2 data-parallel ranks = 8", "use 8 or 16"],
    ),
    "batch 3 by 4 x 1": (
        {**BATCH, TRAIN + "global_batch_size": 3},
        1,
        ["global_batch_size = 3", "= 4; use 4"],
    ),
    "batch of no rows": ({TRAIN + "global_batch_size": 0}, 1, ["global_batch_size = 0", "-1", "or more"]),
    "validation longer than training": (
        {"validation.enable": True, "validation.seq_len": 128},
        1,
        ["validation.seq_len = 128", "training.seq_len = 64", "at most the training length"],
    ),
    # ZeRO
    "two spellings that disagree": (
        {PAR + "zero_stage": 2, PAR + "fsdp_reshard_after_forward": "always"},
        2,
        ["fsdp_reshard_after_forward = 'always'", "zero_stage 3", "zero_stage = 2", "keep one of the two"],
    ),
    "a stage with nothing to shard over": (
        {PAR + "zero_stage": 2, DP + "replicate_degree": 2},
        2,
        [
            "zero_stage = 2",
            "data_parallel_replicate_degree = 2",
            "set zero_stage = 0, or a shard degree above 1",
        ],
    ),
    "stage 0 in HSDP": (
        {PAR + "zero_stage": 0, DP + "replicate_degree": 2},
        4,
        [
            "zero_stage = 0",
            "data_parallel_shard_degree = 2",
            "data_parallel_replicate_degree = 4",
            "1 to 3 for HSDP",
        ],
    ),
    "regrouping without stage 3": (
        {PAR + "zero_stage": 2, PAR + "zero_reshard_degree": 2},
        4,
        ["zero_reshard_degree = 2", "has stage 2", "set zero_stage = 3"],
    ),
    "regrouping that does not divide": (
        {PAR + "zero_reshard_degree": 3},
        8,
        ["zero_reshard_degree = 3", "the 8 ranks", "use one of 2, 4"],
    ),
    "regrouping of two": (
        {PAR + "zero_reshard_degree": 2},
        2,
        ["zero_reshard_degree = 2", "2 ranks", "leave it out"],
    ),
    "regrouping in HSDP": (
        {PAR + "zero_reshard_degree": 2, DP + "replicate_degree": 2},
        8,
        ["zero_reshard_degree = 2", "only 4 of 8 ranks", "leave it out"],
    ),
    # context
    "rows that do not cut": (
        {PAR + "context_parallel_degree": 4, TRAIN + "seq_len": 60},
        4,
        ["seq_len = 60", "context_parallel_degree = 4 (8 chunks)", "a multiple of 8, such as 56 or 64"],
    ),
    "heads that Ulysses cannot share": (
        {PAR + "context_parallel_degree": 16, PAR + "context_parallel_method": "ulysses"},
        16,
        ["context_parallel_method = 'ulysses'", "8 query heads", "context_parallel_degree = 16", "or 'ring'"],
    ),
    "two context methods": (
        {PAR + "context_parallel_method": "ring", PAR + "context_parallel_rotate_method": "allgather"},
        1,
        [
            "context_parallel_rotate_method = 'allgather'",
            "context_parallel_method = 'ring'",
            "keep one of the two",
        ],
    ),
    # pipeline
    "a trace of no pipeline": (
        {"profiling.pipeline_trace": True},
        1,
        ["profiling.pipeline_trace", "pipeline_parallel_degree = 1", "2 or more"],
    ),
    # learning rate
    "a schedule of no steps": (
        {"lr_scheduler.total_steps": 0, "lr_scheduler.min_lr_factor": 0.1},
        1,
        ["total_steps = 0"],
    ),
    "a schedule that ends before training": (
        {"lr_scheduler.total_steps": 100, TRAIN + "steps": 150},
        1,
        ["lr_scheduler.total_steps = 100", "training.steps = 150", "50 steps", "min_lr_factor above 0"],
    ),
    "decay of more than all steps": (
        {"lr_scheduler.decay_ratio": 1.5},
        1,
        ["lr_scheduler.decay_ratio = 1.5", "0 to 1"],
    ),
    "an end above the peak": (
        {"lr_scheduler.min_lr_factor": 2.0},
        1,
        ["lr_scheduler.min_lr_factor = 2.0", "0 to 1"],
    ),
    "beta 1": ({"optimizer.beta1": 1.0}, 1, ["optimizer.beta1 = 1.0", "below 1"]),
    "beta below 0": ({"optimizer.beta2": -0.1}, 1, ["optimizer.beta2 = -0.1", "at least 0"]),
    # switches
    "every which block": (
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "some"},
        1,
        ["activation_checkpoint.selective_ac_option = 'some'", "'op'", "a number n >= 1"],
    ),
    "every 0th block": (
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "0"},
        1,
        ["activation_checkpoint.selective_ac_option = '0'", "a number n >= 1"],
    ),
    "a budget without a compiler": (
        {"activation_checkpoint.mode": "memory_budget"},
        1,
        ["activation_checkpoint.mode = 'memory_budget'", "compile.enable = true", "'selective' or 'full'"],
    ),
    "a budget above all": (
        {"activation_checkpoint.memory_budget": 1.5},
        1,
        ["memory_budget = 1.5", "0 to 1"],
    ),
    "a part that is not compiled": (
        {"compile.components": ["head"]},
        1,
        ["compile.components", "'head'", "'model' and 'loss'"],
    ),
    "computing above the stored type": (
        {TRAIN + "dtype": "bfloat16", TRAIN + "mixed_precision_param": "float32"},
        1,
        [
            "mixed_precision_param = 'float32'",
            "training.dtype = 'bfloat16'",
            "store float32, or compute in bfloat16",
        ],
    ),
    "validation of no batches": ({"validation.steps": 0}, 1, ["validation.steps = 0", "-1", "at least 1"]),
    # checkpoints
    "saving at no step": ({"checkpoint.interval": 0}, 1, ["checkpoint.interval = 0", "at least 1"]),
    "keeping fewer than none": ({"checkpoint.keep_latest_k": -1}, 1, ["keep_latest_k = -1", "0 (keep all)"]),
    "a step before the first": (
        {"checkpoint.load_step": -2},
        1,
        ["checkpoint.load_step = -2", "-1 (the newest)"],
    ),
    "loading while checkpoints are off": (
        {"checkpoint.load_step": 4},
        1,
        ["load_step = 4", "checkpoint.enable = true"],
    ),
    "a seed without checkpoints": (
        {"checkpoint.create_seed_checkpoint": True},
        1,
        ["create_seed_checkpoint = true", "checkpoint.enable = true"],
    ),
    "load only without checkpoints": (
        {"checkpoint.load_only": True},
        1,
        ["load_only = true", "checkpoint.enable = true"],
    ),
    "a seed that is not saved": (
        {"checkpoint.enable": True, "checkpoint.create_seed_checkpoint": True, "checkpoint.load_only": True},
        1,
        ["create_seed_checkpoint = true", "load_only = true", "keep one"],
    ),
    "optimizer state in a foreign format": (
        {"checkpoint.last_save_in_hf": True, "checkpoint.last_save_model_only": False},
        1,
        ["last_save_in_hf = true", "last_save_model_only = false", "set it to true"],
    ),
    "a foreign format from nowhere": (
        {"checkpoint.initial_load_in_hf": True},
        1,
        ["initial_load_in_hf = true", "initial_load_path"],
    ),
    "optimizer state from a foreign format": (
        {
            "checkpoint.initial_load_in_hf": True,
            "checkpoint.initial_load_path": "somewhere",
            "checkpoint.initial_load_model_only": False,
        },
        1,
        ["initial_load_in_hf = true", "initial_load_model_only = false", "set it to true"],
    ),
    "a part that is not in checkpoints": (
        {"checkpoint.exclude_from_loading": ["lr_scheduler"]},
        1,
        ["exclude_from_loading", "'lr_scheduler'", "model, optimizer, dataloader, generators"],
    ),
    "no time at all": ({"job.max_minutes": -1.0}, 1, ["job.max_minutes = -1", "0 (no limit) or more"]),
}

SMALLEST = {
    **dict.fromkeys(("local_batch_size", "seq_len", "steps"), 1),
    **dict.fromkeys(("epochs", "max_norm", "max_skipped_steps", "loss_chunk_mib", "gc_freq"), 0),
}
LEAST = {
    **{f"training.{name}": least for name, least in SMALLEST.items()},
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.min_lr_factor": 0,
    "optimizer.lr": 0,
    "optimizer.eps": 0,
    "optimizer.weight_decay": 0,
    "validation.local_batch_size": 1,
    "validation.seq_len": 1,
    "validation.freq": 1,
    "metrics.log_freq": 1,
    "comm.init_timeout_seconds": 1,
    "comm.train_timeout_seconds": 1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_the_numbers(name: str) -> None:
    keys, world, parts = REFUSED[name]
    (problem,) = problems(keys, world)
    assert [part for part in parts if part not in problem] == [], problem


@pytest.mark.parametrize("key", LEAST)
def test_numbers_have_a_least_value(key: str) -> None:
    below, least = LEAST[key] - 1, LEAST[key]
    assert f"{key} = {below} must be at least {least}" in problems({key: below})
    assert not any(key in problem for problem in _all_problems({key: least}))


def _all_problems(keys: Keys) -> list[str]:
    try:
        checked(keys)
    except ConfigError as error:
        return error.problems
    return []


def test_all_problems_come_at_once() -> None:
    keys = {**REFUSED["batch 10 by 4 x 2"][0], "optimizer.lr": -1.0, "fault_tolerance.enable": True}
    assert len(problems(keys, 2)) == 3


def test_what_the_keys_come_to() -> None:
    layout = checked({PAR + "tensor_parallel_degree": 2, **BATCH, TRAIN + "global_batch_size": 24}, 4)
    assert (layout.topology, layout.accumulation) == (Topology(dp_shard=2, tp=2), 3)
    assert checked(BATCH, 4).global_batch_size == 16  # no accumulation
    assert checked({"debug.seed": 3, TRAIN + "seed": 5}).seed == 3
    assert checked({TRAIN + "seed": 5}).seed == 5


@pytest.mark.parametrize(
    ("keys", "world", "stage", "is_open"),
    [
        ({}, 1, 0, False),  # nothing to shard over
        ({DP + "replicate_degree": 2}, 2, 0, False),
        ({}, 2, 3, True),
        ({PAR + "context_parallel_degree": 2}, 2, 3, True),  # context ranks share the weights too
        ({PAR + "zero_stage": 1}, 2, 1, False),
        ({PAR + "fsdp_reshard_after_forward": "never"}, 2, 2, False),
        ({PAR + "fsdp_reshard_after_forward": "always"}, 2, 3, False),
        ({PAR + "zero_reshard_degree": 2}, 4, 3, False),
    ],
)
def test_the_stage_asked_for_and_the_stage_left_open(
    keys: Keys, world: int, stage: int, is_open: bool
) -> None:
    layout = checked(keys, world)
    assert layout.zero_stage == stage
    assert leaves_zero_stage_open(config_with(keys), layout.topology) == is_open


def test_torchtitans_words_for_context_methods() -> None:
    words = {"allgather": "allgather", "alltoall": "ring", None: "ring"}
    for rotate, method in words.items():
        assert context_method(config_with({PAR + "context_parallel_rotate_method": rotate})) == method


def test_problems_of_the_model_are_among_them() -> None:
    args = replace(ARGS, n_kv_heads=3)
    assert problems({}, args=args) == args.problems()


def test_a_refused_run_ends_with_status_2_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    words = ["train", "--config", str(tmp_path / "empty.toml"), f"--job.dump_folder={tmp_path / 'run'}"]
    keys = {DP + "shard_degree": 2, TRAIN + "steps": 0}
    done = subprocess.run(
        [sys.executable, "-m", "titan5d", *words, *(f"--{key}={value}" for key, value in keys.items())],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 2, done.stderr
    assert "data_parallel_shard_degree 2" in done.stderr and "training.steps = 0" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
