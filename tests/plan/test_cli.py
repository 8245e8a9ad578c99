"""The command: exit statuses, refusals, JSON, speed, and that it never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan5d.plan.cli import main

LLAMA_70B = ["--config", "llama70b", "--gpus", "256", "--gpu", "h100-80g"]


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from titan5d.__main__ import main; main(sys.argv[1:]);"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    words = [sys.executable, "-c", code, "plan", *LLAMA_70B]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert found.stderr.strip() == "False"
    assert "fits" in found.stdout


def test_a_plan_takes_less_than_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    assert main(["--config", "deepseek_v3_671b"]) == 0
    assert time.process_time() - start < 1
    capsys.readouterr()


def test_json_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA_70B, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["memory"]
    assert (
        rank["total"] == pytest.approx(sum(rank["lines"].values())) and found["fits"] and found["margin"] > 0
    )
    assert found["layout"]["dp_shard"] == 256 and found["machine"]["gpus_per_node"] == 8
    assert sum(found["time"]["parts"].values()) == pytest.approx(found["time"]["step"])
    assert found["tokens_per_second"] == pytest.approx(256 * found["tokens_per_second_per_gpu"])
    assert found["mfu"] == pytest.approx(found["tflops"] / found["peak_tflops"])
    assert {one["axis"] for one in found["traffic"]} == {"dp_shard"}
    assert found["assumptions"]["gemm"] > 0 and found["assumed_overlap"]


def test_what_does_not_fit_is_1_and_comes_with_changes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "llama3_8b", "--gpus", "8", "--gpu", "a100-40g"]
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["margin"] < 0 and found["changes"]
    for change in found["changes"]:  # each of them, set on its own, makes it fit
        (key, value) = next(iter(change["set"].items()))
        written = str(value).lower() if isinstance(value, bool) else str(value)
        more = ["--parallelism.data_parallel_shard_degree", "-1"]
        assert main([*words, f"--{key}", written, *(more if key.endswith("_degree") else []), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["time"]["step"] == pytest.approx(change["step_time"])
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "does NOT fit" in said and "changes that would make it fit" in said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["--config NAME|FILE or --model"]),
        (["--config", "llama70b", "--gpus", "0", "--gpu", "h200"], ["--gpus 0"]),
        (["--config", "llama70b", "--gpus", "64", "--gpu", "h10080g"], ["did you mean h100-80g", "a100-40g"]),
        ([*LLAMA_70B, "--intra", "450"], ["--intra", "450GB/s (bytes)"]),
        ([*LLAMA_70B, "--inter", "0GB/s", "--nodes-of", "0"], ["--inter", "--nodes-of 0"]),
        ([*LLAMA_70B, "--assume", "gem=0.5"], ["--assume gem=0.5", "gemm", "allocator"]),
        ([*LLAMA_70B, "--assume", "gemm=5"], ["gemm lies between 0.01 and 1"]),
        ([*LLAMA_70B, "--write", "x.toml"], ["--write belongs to --search"]),
        ([*LLAMA_70B, "--hsdp-nodes", "2-4", "--fill", "0.5"], ["--hsdp-nodes belongs", "--fill belongs"]),
        (["--config", "llama70b", "--gpu", "H100 SXM"], ["did you mean h100-80g or h100-96g"]),
        ([*LLAMA_70B, "--family", "llama3"], ["--family belongs to --model"]),
        ([*LLAMA_70B, "--model", "8B"], ["keep one of them"]),
        (["--model", "8B", "--gpus", "8", "--gpu", "h200"], ["--seq", "--global-batch"]),
        (
            ["--model", "8B", "--gpus", "8", "--gpu", "h200", "--seq", "8192", "--global-batch", "64"],
            ["llama3 and qwen3", "--family"],
        ),
        (
            ["--model", "70b", "--gpus", "8", "--gpu", "h200", "--seq", "8192", "--global-batch", "64"],
            ["did you mean 70B?"],
        ),
        ([*LLAMA_70B, "--parallelism.tensor_parallel_degree", "3"], ["parallelism", "3"]),
        ([*LLAMA_70B, "--training.seqlen", "3"], ["training.seqlen", "unknown key"]),
        (["--config", "llama70b", "--gpus", "256", "--gpu", "v100-32g"], ["no units for bfloat16"]),
        ([*LLAMA_70B, "--search", "--hsdp-nodes", "x"], ["--hsdp-nodes x", "2-8"]),
    ],
)
def test_refusals_name_what_is_wrong(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in parts:
        assert part in shown.err


def test_flags_change_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    for more in ([], ["--inter", "40Gb/s"], ["--nodes-of", "1"], ["--assume", "gemm=0.3"]):
        assert main([*LLAMA_70B, "--json", *more]) == 0
        steps.append(json.loads(capsys.readouterr().out)["time"]["step"])
    assert min(steps[1:]) > steps[0]


def test_a_search_writes_a_config_that_is_planned_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "best.toml"
    words = ["--model", "70B", "--gpus", "64", "--gpu", "h100-80g", "--seq", "8192", "--global-batch", "1024"]
    assert main([*words, "--search", "--top", "3", "--write", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ranking"]) == 3 and found["why"] and found["rejected"]
    assert main(["--config", str(path), "--json"]) == 0  # its hardware is in its comment
    again = json.loads(capsys.readouterr().out)
    assert again["time"]["step"] == pytest.approx(found["best"]["time"]["step"])
    assert "Hardware: 64 x h100-80g" in path.read_text()


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA_70B, "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_nodes_that_are_not_full_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA_70B, "--nodes-of", "7"]) == 0
    assert "37 nodes of 7, the last with 4" in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "titan5d", "plan", "--config", "llama405b", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1 and said == b""
