"""`titan5d dryrun` from the command line: what it prints, and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from titan5d.__main__ import main
from titan5d.parallel import tensor_products

SMALL = ["--config", "quickstart", "--model.n_layers", "2", "--training.global_batch_size", "4"]
PIPELINE = [
    *SMALL,
    "--parallelism.pipeline_parallel_degree",
    "2",
    "--parallelism.tensor_parallel_degree",
    "2",
]


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["dryrun", "--world", "1024", "--config", "quickstart", "--training.global_batch_size", "2048"])
        == 0
    )
    out = capsys.readouterr().out
    assert "dry run of 1,024 ranks (dp_shard 1024), zero_stage 3, 1 micro-batches a step" in out
    assert "rank 0 (all ranks do the same)" in out and "reduce_scatter" in out
    assert "zero_stage is open" in out


def test_one_object_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", "--world", "4", "--all-kinds", "--json", *PIPELINE]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(rank["rank"], rank["kind"]) for rank in found["ranks"]] == [
        (0, "first stage: 0 of 0..1"),
        (2, "last stage: 1 of 0..1"),
    ]
    for rank in found["ranks"]:
        purposes = {name: value for name, value in rank["peak"].items() if name != "total"}
        assert (
            sum(purposes.values()) == rank["peak"]["total"] == max(one["total"] for one in rank["timeline"])
        )
        assert rank["flops"]["products"] > 0
    first, last = found["ranks"]
    assert first["highest"]["logits"] == 0 < last["highest"]["logits"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--world", "3", *PIPELINE], "does not divide the 3 ranks"),
        (["--world", "2", "--rank", "2", *SMALL], "--rank 2: the ranks of --world 2 are 0..1"),
        (["--world", "2", "--imbalance", "0.5", *SMALL], "--imbalance 0.5: load of the fullest rank"),
        (["--world", "2", "--documents", "257", *SMALL], "--documents 257: a row of training.seq_len = 256"),
        (["--world", "2", "--nonsense", "1", *SMALL], "--nonsense: a flag has the form --section.key value"),
    ],
)
def test_refusals(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_step_that_would_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = tensor_products._local
    monkeypatch.setattr(tensor_products, "_local", lambda parameter: original(parameter)[:, :-1])
    assert main(["dryrun", "--world", "4", "--rank", "2", *PIPELINE]) == 1
    assert (
        "error on rank 2 (last stage: 1 of 0..1), in forward, layers.1.attention" in capsys.readouterr().err
    )


ROWS = ("--training.global_batch_size",)
FEW_LAYERS = ("--model.n_layers", "2")
# Fewer layers, micro-batches and pipeline ranks, so that a test is quick; the world stays that of the file
CONFIGS = {
    "quickstart": [*FEW_LAYERS],
    "moe_debug": [*FEW_LAYERS],
    "llama3_8b": [*FEW_LAYERS, *ROWS, "8"],
    "llama70b": [*FEW_LAYERS],
    "llama405b": [
        *("--model.n_layers", "4", "--parallelism.pipeline_parallel_degree", "2"),
        *("--parallelism.data_parallel_shard_degree", "-1", "--training.global_batch_size", "128"),
    ],
    "mixtral_8x7b": [*FEW_LAYERS, *ROWS, "64"],
    "qwen3_30b_a3b": [*FEW_LAYERS, *ROWS, "64"],
    "deepseek_v3_671b": [
        *("--model.n_layers", "4", "--parallelism.pipeline_parallel_degree", "2"),
        *("--parallelism.data_parallel_shard_degree", "-1", "--training.global_batch_size", "2048"),
    ],
}


def hardware(name: str) -> int:
    """Devices that a file is made for, as it says."""
    text = (Path(__file__).parents[2] / "train_configs" / f"{name}.toml").read_text(encoding="utf-8")
    found = re.search(r"^# Hardware: (\d+) x", text, re.MULTILINE)
    assert found is not None, f"{name}.toml does not say what it runs on"
    return int(found[1])


def test_every_config_is_among_them() -> None:
    folder = Path(__file__).parents[2] / "train_configs"
    assert {file.stem for file in folder.glob("*.toml")} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_runs_dry(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world", str(hardware(name)), "--json", "--config", name, *CONFIGS[name]]
    assert main(["dryrun", *words]) == 0, capsys.readouterr().err
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["peak"]["total"] < 80e9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "flags"),
    [
        ("llama70b", 1024, ["--parallelism.data_parallel_shard_degree", "1024", *ROWS, "1024"]),
        ("deepseek_v3_671b", 2048, [*ROWS, "4096"]),
    ],
)
def test_whole_models(name: str, world: int, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", "--world", str(world), "--json", "--config", name, *flags]) == 0, (
        capsys.readouterr().err
    )
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["peak"]["total"] < 80e9
