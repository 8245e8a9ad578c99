"""Whole runs through `titan5d train` on forked ranks: what is logged, and that the layout does not show in it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from titan5d.launch.local_ranks import run_ranks
from titan5d.launch.run import train
from titan5d.metrics.flops import FlopShape, MoeShape, flops_per_token

TINY = {
    "model.dim": 64,
    "model.n_layers": 2,
    "model.n_heads": 8,
    "model.n_kv_heads": 4,
    "model.ffn_dim": 128,
    "model.vocab_size": 259,
    "model.tokenizer_path": "bytes",
    "training.dataset": "tokens",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "training.mixed_precision_param": "float32",
    "optimizer.name": "SGD",
    "optimizer.lr": 0.1,
    "optimizer.weight_decay": 0.0,
    "lr_scheduler.warmup_steps": 0,
    "metrics.log_freq": 1,
    "metrics.peak_flops": "1e12",
    "metrics.enable_tensorboard": "false",
    "debug.log_samples": "true",
}


def write_rows(path: Path, rows: int = 64, seq_len: int = 32, valid: list[int] | None = None) -> Path:
    generator = torch.Generator().manual_seed(7)
    with path.open("w") as out:
        for row in range(rows):
            tokens = torch.randint(256, (seq_len,), generator=generator).tolist()
            count = seq_len if valid is None else valid[row % len(valid)]
            labels = [(t * 7) % 256 if i < count else -100 for i, t in enumerate(tokens)]
            out.write(json.dumps({"tokens": tokens, "labels": labels}) + "\n")
    return path


def run(folder: Path, name: str, ranks: int = 1, **flags: Any) -> tuple[list[int], list[dict]]:
    """(exit status of each rank, lines of metrics.jsonl)."""
    (folder / "empty.toml").write_text("")
    merged = {**TINY, **{key.replace("__", "."): value for key, value in flags.items()}}
    merged.setdefault("training.dataset_path", folder / "rows.jsonl")
    merged["job.dump_folder"] = folder / name
    words = ["--config", str(folder / "empty.toml"), *(f"--{key}={value}" for key, value in merged.items())]
    statuses = run_ranks(train, ranks, words, timeout=100)
    metrics = folder / name / "metrics.jsonl"
    return statuses, [
        json.loads(line) for line in metrics.read_text().splitlines()
    ] if metrics.exists() else []


def samples(folder: Path, name: str, rank: int) -> list[list[int]]:
    lines = (folder / name / f"samples-rank{rank}.jsonl").read_text().splitlines()
    return [json.loads(line)["samples"] for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", valid=[3, 31, 1, 20, 32, 2, 7, 15])
    return tmp_path


SAME = ("loss", "max_loss", "grad_norm", "lr", "tokens", "valid_tokens", "n_tokens_seen", "consumed_samples")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, {"training__local_batch_size": 8}),
        (1, {"training__local_batch_size": 1}),
        (2, {"training__local_batch_size": 4}),
        (2, {"parallelism__zero_stage": 1, "training__local_batch_size": 1}),
        (4, {"parallelism__data_parallel_replicate_degree": 2}),
    ],
    ids=["accumulation 1", "accumulation 8", "2 ranks", "2 ranks, accumulation 4", "HSDP 2x2"],
)
def test_the_layout_does_not_show_in_the_log(folder: Path, ranks: int, flags: dict) -> None:
    _, expected = run(folder, "reference")
    statuses, found = run(folder, "layout", ranks, **flags)
    assert statuses == [0] * ranks and len(found) == len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        for key in SAME:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5 if key == "grad_norm" else 2e-6), key
        assert ours["tps_per_device"] * ranks == pytest.approx(ours["tps"])
    assert found[0]["tokens"] == 8 * 32
    one = [sorted(step) for step in samples(folder, "reference", 0)]
    many = [samples(folder, "layout", rank) for rank in range(ranks)]
    assert [sorted(chain(*parts)) for parts in zip(*many, strict=True)] == one


@pytest.mark.parametrize(
    ("cut", "data_rank"),
    [("pipeline", [0, 0, 1, 1, 0, 0, 1, 1]), ("context", [0, 0, 0, 0, 1, 1, 1, 1])],
)
def test_model_parallel_peers_read_the_same_rows(folder: Path, cut: str, data_rank: list[int]) -> None:
    """Case 043: 2 x 2 ranks share their rows, the two groups have none in common, an epoch has every row once."""
    write_rows(folder / "few.jsonl", rows=24)
    degrees = {"parallelism__tensor_parallel_degree": 2, f"parallelism__{cut}_parallel_degree": 2}
    data = {"training__dataset_path": folder / "few.jsonl", "training__epochs": 1, "training__steps": 100}
    statuses, found = run(folder, "run", 8, **degrees, **data)
    assert statuses == [0] * 8
    assert [line["tokens"] for line in found] == [8 * 32] * 3  # 24 rows, 8 a step
    ranks = [samples(folder, "run", rank) for rank in range(8)]
    groups = [ranks[data_rank.index(0)], ranks[data_rank.index(1)]]
    assert [groups.index(rank) for rank in ranks] == data_rank
    steps = [one + other for one, other in zip(*groups, strict=True)]
    assert [len(set(step)) for step in steps] == [8, 8, 8]
    assert sorted(chain(*steps)) == list(range(24))


DENSE_SHAPE = FlopShape(64, 4, 8, 4, 8, 128, 259)
EXPERT_SHAPE = replace(DENSE_SHAPE, moe=MoeShape(n_experts=8, top_k=2, expert_dim=64))


@pytest.mark.parametrize(
    ("degrees", "shape", "local_batch"),
    [
        ({"tensor": 4}, DENSE_SHAPE, 2),
        ({"pipeline": 4}, DENSE_SHAPE, 8),
        ({"context": 4}, DENSE_SHAPE, 8),
        ({"tensor": 2}, DENSE_SHAPE, 1),
        ({"expert": 4}, EXPERT_SHAPE, 2),
    ],
    ids=["tp4, accumulation 4", "pp4", "cp4", "dp2 tp2, accumulation 4", "ep4"],
)
def test_throughput_is_that_of_the_global_batch(
    folder: Path, degrees: dict[str, int], shape: FlopShape, local_batch: int
) -> None:
    """Cases 078 and 079: neither peers nor micro-batches count tokens again, and only active experts count."""
    flags: dict[str, Any] = {f"parallelism__{cut}_parallel_degree": n for cut, n in degrees.items()}
    flags |= {"model__n_layers": 4, "training__local_batch_size": local_batch, "training__steps": 2}
    if shape.moe is not None:
        flags |= {"model__name": "mixtral", "model__n_experts": 8, "model__top_k": 2, "model__moe_ffn_dim": 64}
    statuses, found = run(folder, "run", 4, **flags)
    assert statuses == [0] * 4 and len(found) == 2
    for line in found:
        assert line["tps_per_device"] * 4 * line["time_step"] == pytest.approx(8 * 32, rel=1e-6)
        assert line["mfu"] == pytest.approx(flops_per_token(shape, 32) * line["tps_per_device"] / 1e12, rel=1e-6)


def test_the_same_run_twice_is_bitwise_the_same(folder: Path) -> None:
    flags = {"debug__deterministic": "true", "optimizer__name": "AdamW", "optimizer__lr": 1e-3}
    losses = [[line["loss"] for line in run(folder, name, 2, **flags)[1]] for name in ("one", "two")]
    assert losses[0] == losses[1]


def test_the_seed_changes_weights_and_order(folder: Path) -> None:
    first = [run(folder, f"seed{seed}", training__seed=seed)[1][0]["loss"] for seed in (0, 1)]
    assert first[0] != first[1]
    assert samples(folder, "seed0", 0) != samples(folder, "seed1", 0)
    # TorchTitan's place of the seed means the same
    run(folder, "debug", debug__seed=1)
    assert samples(folder, "debug", 0) == samples(folder, "seed1", 0)


def test_validation_leaves_training_untouched(folder: Path) -> None:
    """Case 086: the same held-out rows every round, train losses bitwise equal to a run without validation."""
    write_rows(folder / "held_out.jsonl", rows=7)
    _, without = run(folder, "without", 2)
    flags = {
        "validation__enable": "true",
        "validation__dataset": "tokens",
        "validation__dataset_path": folder / "held_out.jsonl",
        "validation__seq_len": 32,
        "validation__local_batch_size": 2,
        "validation__freq": 2,
        "optimizer__lr": 0.1,
    }
    statuses, found = run(folder, "with", 2, **flags)
    assert statuses == [0, 0]
    assert [line["loss"] for line in found] == [line["loss"] for line in without]
    rounds = [line["validation_loss"] for line in found if "validation_loss" in line]
    assert len(rounds) == 2
    # with the weights held still, every round sees the same rows: 7 rows on 2 ranks, none left out, none twice
    _, still = run(folder, "still", 2, **{**flags, "optimizer__lr": 0})
    _, alone = run(folder, "alone", 1, **{**flags, "optimizer__lr": 0, "validation__local_batch_size": 7})
    values = [line["validation_loss"] for line in still + alone if "validation_loss" in line]
    assert len(values) == 4 and values == pytest.approx([values[0]] * 4, rel=1e-6)


def test_the_data_ends_on_all_ranks_at_the_same_step(folder: Path) -> None:
    """Case 040: 17 rows, 4 a step, one epoch: four steps of the hundred asked for; asked for, so status 0."""
    write_rows(folder / "few.jsonl", rows=17)
    flags = {"training__dataset_path": folder / "few.jsonl", "training__epochs": 1, "training__steps": 100}
    statuses, found = run(folder, "ends", 2, training__global_batch_size=4, **flags)
    assert statuses == [0, 0] and len(found) == 4


def test_a_bad_gradient_never_reaches_the_weights(folder: Path) -> None:
    """An infinite rate of divergence: weights overflow in step 1, later gradients are not finite and are left out."""
    flags = {
        "optimizer__lr": 1e30,
        "training__max_norm": 0,
        "training__steps": 20,
        "training__max_skipped_steps": 3,
    }
    statuses, found = run(folder, "diverges", 2, **flags)
    assert statuses == [1, 1]  # not 0: fewer steps than asked
    assert found[-1]["skipped_steps"] == 4
    assert all(isinstance(line["grad_norm"], str) for line in found[-4:])  # "NaN" or "Infinity"


def test_steps_without_any_target_are_counted_no_ops(folder: Path) -> None:
    write_rows(folder / "none.jsonl", valid=[0])
    statuses, found = run(
        folder, "none", 2, training__dataset_path=folder / "none.jsonl", optimizer__name="AdamW"
    )
    assert statuses == [0, 0] and len(found) == 4
    assert all(line["valid_tokens"] == 0 and line["loss"] == 0 for line in found)


def test_loss_falls_with_every_optimizer(folder: Path) -> None:
    for name, rate in (("AdamW", 3e-3), ("Adam", 3e-3), ("SGD", 0.3), ("Muon", 3e-3)):
        flags = {"optimizer__name": name, "optimizer__lr": rate, "training__steps": 12}
        losses = [line["loss"] for line in run(folder, name, 2, **flags)[1]]
        assert math.isfinite(losses[-1]) and losses[-1] < losses[0] - 0.1, name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"training__global_batch_size": 10}, "training.global_batch_size = 10"),
        ({"parallelism__data_parallel_shard_degree": 3}, "this run has 2 ranks"),
        ({"training__dataset_path": "/nowhere.jsonl"}, "/nowhere.jsonl"),
        ({"model__vocab_size": 200}, "200"),
        ({"training__global_batch_size": 128}, "128"),
        (
            {"model__flavor": "405B", "model__dim": 16384, "model__n_layers": 126, "model__ffn_dim": 53248},
            "GiB",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_work_is_refused_by_all_ranks(
    folder: Path, capfd: pytest.CaptureFixture[str], flags: dict, said: str
) -> None:
    statuses, metrics = run(folder, "refused", 2, **flags)
    assert statuses == [2, 2] and not metrics
    message = capfd.readouterr().err
    assert message.count("refused:") == 1 and said in message
