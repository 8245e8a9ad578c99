"""Runs that are killed outright, again and again: they always go on from a complete checkpoint, and end the same.

A run saves every step; after a random time its whole process group gets SIGKILL; the same command is started again,
until the run is done. Its last checkpoint must be bitwise that of a run that was never killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoint.runs import assert_same_tensors, metrics, run, tensors, words
from titan5d.checkpoint.folder import step_folders
from titan5d.checkpoint.manifest import read_manifest, verify
from titan5d.launch.local_ranks import run_ranks
from titan5d.launch.run import train

ROOT = Path(__file__).resolve().parents[1]
KILLS = 6
"""Of each run; the long soak sets TITAN5D_SOAK_KILLS."""


def kill_at_random(ranks: int, argv: list[str], logged: Path, dice: random.Random) -> None:
    """Starts the run as a process group of its own and kills all of it: while it starts, or somewhere in a step."""
    before = logged.stat().st_size if logged.exists() else 0
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            run_ranks(train, ranks, argv, timeout=200)
        finally:
            os._exit(0)
    try:
        if dice.random() < 0.2:
            time.sleep(dice.uniform(0.2, 4))
        else:
            deadline = time.monotonic() + 100
            while not logged.exists() or logged.stat().st_size <= before:
                assert time.monotonic() < deadline, "no step in 100 s"
                time.sleep(0.02)
            time.sleep(dice.uniform(0, 1))
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run must be longer than the kills"
    finally:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "mode"), [(2, "disabled"), (4, "async")])
def test_killed_at_random_moments(tmp_path: Path, ranks: int, mode: str) -> None:
    flags = {
        "model__n_layers": 2,
        "training__steps": 10_000,
        "checkpoint__interval": 1,
        "checkpoint__keep_latest_k": 3,
        "checkpoint__async_mode": mode,
        "lr_scheduler__total_steps": 10_000,
    }
    kills = int(os.environ.get("TITAN5D_SOAK_KILLS", KILLS))
    argv = words(tmp_path, "killed", **flags)
    folder = tmp_path / "killed" / "checkpoint"
    dice, last = random.Random(11), 0
    for _ in range(kills):
        kill_at_random(ranks, argv, tmp_path / "killed" / "metrics.jsonl", dice)
        there = step_folders(folder)
        for path in there.values():
            assert verify(path, read_manifest(path)) == []
        assert max(there, default=0) >= last and len(there) <= 4
        last = max(there, default=0)
    end = last + 2
    shorter = {**flags, "training__steps": end}
    assert run(tmp_path, "killed", ranks, **shorter) == [0] * ranks
    assert run(tmp_path, "straight", ranks, **{**shorter, "checkpoint__interval": 1000}) == [0] * ranks
    one, two = metrics(tmp_path, "straight"), metrics(tmp_path, "killed")
    assert sorted(one) == sorted(two) == list(range(1, end + 1))
    assert [one[step]["loss"] for step in one] == [two[step]["loss"] for step in sorted(two)]
    assert_same_tensors(tensors(tmp_path, "straight", end), tensors(tmp_path, "killed", end))
    names = {path.name for path in folder.iterdir()}
    assert not [name for name in names if "partial" in name or "leaving" in name]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_to_the_launcher(tmp_path: Path) -> None:
    """Case 058 (b): SIGTERM to the script; one checkpoint, exit status 3, and the same command finishes the run."""
    argv = [
        str(ROOT / "run_train.sh"),
        *words(tmp_path, "a", training__steps=10_000, checkpoint__interval=10_000),
    ]
    environ = {
        **os.environ,
        "NGPU": "2",
        "DEVICE": "cpu",
        "TITAN5D_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        logged = tmp_path / "a" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (logged.exists() and logged.read_text().count("\n") >= 3):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 3, said
    (step,) = step_folders(tmp_path / "a" / "checkpoint")
    assert f"SIGTERM: stopped after step {step} of 10000" in said and "Traceback" not in said
    again = [str(ROOT / "run_train.sh"), *words(tmp_path, "a", training__steps=step + 1)]
    assert subprocess.run(again, env=environ, timeout=120, check=False).returncode == 0
    assert sorted(metrics(tmp_path, "a")) == list(range(1, step + 2))
