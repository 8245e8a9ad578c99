"""Asked to stop: the step is finished, saved once by all ranks at the same step, and the run goes on from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import assert_same_tensors, metrics, run, tensors, words
from titan5d.checkpoint.folder import complete_steps
from titan5d.launch.local_ranks import run_ranks
from titan5d.launch.run import train
from titan5d.train import trainer

SMALL: dict[str, Any] = {"model__n_layers": 2, "model__dim": 32, "checkpoint__interval": 10_000}


def signalled(words: list[str], ranks: list[int], number: int) -> int:
    """Trains; these ranks get the signal during the third step of this run."""
    step, count = trainer.train_step, [0]

    def with_signal(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == 3 and int(os.environ["RANK"]) in ranks:
            os.kill(os.getpid(), number)
        return step(*args, **kwargs)

    trainer.train_step = with_signal
    return train(words)


@pytest.mark.parametrize(
    ("ranks", "number", "mode"),
    [([3], signal.SIGTERM, "disabled"), ([0, 1, 2, 3], signal.SIGUSR1, "async")],
    ids=["SIGTERM to one rank", "SIGUSR1 to all, async"],
)
def test_a_signal_to_any_rank(tmp_path: Path, ranks: list[int], number: int, mode: str) -> None:
    """Case 058."""
    cut = {**SMALL, "parallelism__tensor_parallel_degree": 2, "checkpoint__async_mode": mode}
    argv = words(tmp_path, "a", **cut)
    assert run_ranks(signalled, 4, argv, ranks, number, timeout=100) == [3, 3, 3, 3]
    (step,) = complete_steps(tmp_path / "a" / "checkpoint")
    assert step in (3, 4) and max(metrics(tmp_path, "a")) == step
    assert run(tmp_path, "a", 4, **cut) == [0] * 4
    assert run(tmp_path, "straight", 4, **cut) == [0] * 4
    assert_same_tensors(tensors(tmp_path, "a", 6), tensors(tmp_path, "straight", 6))


def test_a_signal_without_checkpoints_is_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = words(tmp_path, "a", **SMALL, checkpoint__enable="false")
    assert run_ranks(signalled, 2, argv, [1], signal.SIGINT, timeout=100) == [1, 1]
    said = capfd.readouterr().err
    assert "SIGINT: stopped after step" in said and "nothing was saved" in said
    assert not (tmp_path / "a" / "checkpoint").exists()


def test_a_run_ends_when_its_time_is_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = {**SMALL, "job__max_minutes": 1e-6, "training__steps": 3}
    for step in (1, 2):
        assert run(tmp_path, "a", 2, **flags) == [3, 3]
        assert f"job.max_minutes = 1e-06: stopped after step {step} of 3" in capfd.readouterr().err
        assert complete_steps(tmp_path / "a" / "checkpoint")[0] == step
    assert run(tmp_path, "a", 2, **flags) == [0, 0]
    assert sorted(metrics(tmp_path, "a")) == [1, 2, 3]
