"""Small runs through `titan5d train` on forked ranks, and what they leave."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from titan5d.checkpoint.manifest import read_manifest
from titan5d.checkpoint.source import CheckpointSource, read_whole
from titan5d.launch.local_ranks import run_ranks
from titan5d.launch.run import train

TINY = {
    "model.dim": 64,
    "model.n_layers": 4,
    "model.n_heads": 8,
    "model.n_kv_heads": 4,
    "model.ffn_dim": 128,
    "model.vocab_size": 259,
    "model.tokenizer_path": "bytes",
    "training.dataset": "tokens",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 6,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": 1e-3,
    "optimizer.eps": 1e-5,
    "lr_scheduler.warmup_steps": 2,
    "metrics.log_freq": 1,
    "metrics.peak_flops": "1e12",
    "metrics.enable_tensorboard": "false",
    "checkpoint.enable": "true",
    "checkpoint.interval": 3,
    "checkpoint.last_save_model_only": "false",
    "debug.deterministic": "true",
    "debug.log_samples": "true",
}


def write_rows(path: Path, rows: int = 64, seq_len: int = 32) -> None:
    generator = random.Random(7)
    with path.open("w") as out:
        for _ in range(rows):
            tokens = [generator.randrange(256) for _ in range(seq_len)]
            valid = generator.randrange(1, seq_len)
            labels = [token * 7 % 256 if i < valid else -100 for i, token in enumerate(tokens)]
            out.write(json.dumps({"tokens": tokens, "labels": labels}) + "\n")


def words(folder: Path, name: str, **flags: Any) -> list[str]:
    (folder / "empty.toml").write_text("")
    if not (folder / "rows.jsonl").exists():
        write_rows(folder / "rows.jsonl")
    merged = {**TINY, "training.dataset_path": folder / "rows.jsonl", "job.dump_folder": folder / name}
    merged |= {key.replace("__", "."): value for key, value in flags.items()}
    return ["--config", str(folder / "empty.toml"), *(f"--{key}={value}" for key, value in merged.items())]


def run(folder: Path, name: str, ranks: int = 1, *, limit: float = 120, **flags: Any) -> list[int]:
    """Exit statuses by rank. limit: seconds."""
    return run_ranks(train, ranks, words(folder, name, **flags), timeout=limit)


def metrics(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line for line in lines}


def tensors(folder: Path, name: str, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    path = folder / name / "checkpoint" / f"step-{step}"
    source = CheckpointSource(path, read_manifest(path))
    return {key: read_whole(source, key) for key in source.specs()}


def assert_same_tensors(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys() and len(one) > 30
    for key, tensor in one.items():
        assert torch.equal(tensor, two[key]), key
