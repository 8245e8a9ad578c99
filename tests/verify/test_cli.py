"""`titan5d verify` as it is called: what it prints and writes, its exit status, refusals, failing ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import titan5d.train.step as step
from titan5d.__main__ import main


def test_a_default_run_proves_the_quick_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start = time.monotonic()
    assert main(["verify", "--html", str(tmp_path / "report.html")]) == 0
    assert time.monotonic() - start < 60
    out = capsys.readouterr().out
    assert "the layout trains the model of one process" in out
    assert "n_layers 6 ->" in out and "AdamW -> SGD" in out  # says what it shrank
    page = (tmp_path / "report.html").read_text()
    assert "http" not in page and '<td class="name">dp2</td>' in page


def test_one_object_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "verify",
        "--layouts",
        "dp2z1, ep2, tp3",
        "--json",
        "--parallelism.fsdp_reshard_after_forward=always",
    ]
    assert main(words) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["equal"] and [row["status"] for row in found["layouts"]] == ["equal", "refused", "refused"]
    assert set(found["layouts"][0]["checks"]) == {
        "loss",
        "max_loss",
        "gradients",
        "norm",
        "weights",
        "metrics",
    }
    assert "tensor_parallel_degree = 3" in found["layouts"][2]["message"]
    assert len(found["reference"]) == 3 and found["shrunk"]


def test_every_legal_layout_of_a_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--world", "2", "--json", "--parallelism.zero_stage=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    # replicas alone leave stage 1 nothing to shard
    assert {row["layout"]: row["status"] for row in found["layouts"]} == dict.fromkeys(
        ("dp2", "tp2", "cp2", "pp2"), "equal"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layouts", "dp2qp2"], "cannot read 'qp2'"),
        (["--layouts", "tp3, tp5"], "all 2 are refused"),
        (["--world", "99"], "--world 99"),
        (["--config", "nothing"], "nothing"),
        (["--training.seq_lenn", "5"], "seq_lenn"),
        (["--model.n_heads", "7"], "n_heads = 7"),
        (["--html", "/nowhere/x.html"], "/nowhere/x.html"),
        (["--time-limit", "0"], "--time-limit 0"),
        (["--composition", "x.md", "--model.dim", "8"], "leave out"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_refusals(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_rank_that_raises_or_dies_is_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = step.global_norm

    def raises_on_rank_1(parameters: object, pipeline_group: object = None) -> torch.Tensor:
        if int(os.environ["WORLD_SIZE"]) == 2 and os.environ["RANK"] == "1":
            raise ValueError("the disk is full")
        if int(os.environ["WORLD_SIZE"]) == 4 and os.environ["RANK"] == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(parameters, pipeline_group=pipeline_group)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "global_norm", raises_on_rank_1)
    assert main(["verify", "--layouts", "dp2, dp4, one"]) == 1
    out = capsys.readouterr().out
    assert "the disk is full" in out and "rank 3 of 4 died" in out
    assert "2 of 3 layouts do NOT train the model of one process: dp2, dp4" in out


def test_a_rank_that_hangs_is_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = step.global_norm

    def sleeps_on_rank_1(parameters: object, pipeline_group: object = None) -> torch.Tensor:
        if os.environ["RANK"] == "1":
            time.sleep(1000)
        return whole(parameters, pipeline_group=pipeline_group)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "global_norm", sleeps_on_rank_1)
    start = time.monotonic()
    assert main(["verify", "--layouts", "dp2", "--time-limit", "8"]) == 1
    assert time.monotonic() - start < 40
    assert "failed" in capsys.readouterr().out


def test_a_breach_is_marked_and_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A gradient of half the size on two ranks."""
    whole = step.normalized
    monkeypatch.setattr(
        step,
        "normalized",
        lambda part, valid_targets: whole(part, valid_targets) / int(os.environ["WORLD_SIZE"]),
    )
    assert main(["verify", "--layouts", "dp2", "--html", str(tmp_path / "report.html")]) == 1
    out = capsys.readouterr().out
    assert "5.0e-01!" in out and "! norm 5.0e-01 > 1e-05: grad_norm at step 1" in out
    assert 'class="bad"' in (tmp_path / "report.html").read_text()
