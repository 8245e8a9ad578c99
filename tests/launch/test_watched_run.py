"""The watchdog in whole runs of `titan5d train`: a stuck rank, an error, and what it costs."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

from tests.launch.forked import Ended, fork_ranks
from tests.train.test_runs import TINY, write_rows
from titan5d.__main__ import main
from titan5d.launch import run as run_module
from titan5d.launch import watchdog as watchdog_module
from titan5d.launch.flight_recorder import FlightRecorder
from titan5d.launch.last_call import LastCall
from titan5d.launch.local_ranks import run_ranks
from titan5d.launch.run import train
from titan5d.train import step as step_module


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "GRACE", 2.0)


def words(folder: Path, **flags: Any) -> list[str]:
    (folder / "empty.toml").write_text("")
    merged = {
        **TINY,
        "training.dataset_path": write_rows(folder / "rows.jsonl"),
        "job.dump_folder": folder / "run",
    }
    merged |= {key.replace("__", "."): value for key, value in flags.items()}
    return ["--config", str(folder / "empty.toml"), *(f"--{key}={value}" for key, value in merged.items())]


@contextmanager
def in_step(number: int, rank: int, do: Callable[[], None]) -> Iterator[None]:
    """On one rank `do` runs in the forward pass of one step."""
    original, calls = step_module.forward, [0]

    def forward(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and dist.get_rank() == rank:
            do()
        return original(*args)

    step_module.forward = forward  # type: ignore[assignment]
    try:
        yield
    finally:
        step_module.forward = original


def stuck_in_a_loop() -> None:
    while True:
        time.sleep(0.05)


def broken() -> None:
    raise ArithmeticError("a number went missing")


def run_that_ends(folder: Path, do: Callable[[], None], **flags: Any) -> list[Ended]:
    given = words(folder, training__local_batch_size=4, comm__train_timeout_seconds=2, **flags)

    def body(rank: int) -> None:
        with in_step(3, 1, do):
            train(given)

    return fork_ranks(body, 2, folder, 40)


def test_a_stuck_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 on all ranks, and the verdict names step, phase, axis and function; `titan5d diagnose` says it again."""
    ended = run_that_ends(tmp_path, stuck_in_a_loop)
    assert [rank.status for rank in ended] == [1, 1]
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "the run hangs: 1 of 2 ranks wait, rank 1 did not come" in text
    assert "rank 0 waits in all_gather" in text and " of dp_shard (ranks 0, 1)" in text
    assert "is in step 3, phase forward" in text
    assert "stuck_in_a_loop" in text and "titan5d/train/step.py" in text
    assert all(line.strip() in ended[0].stderr for line in text.splitlines()[:-1])


def test_a_rank_stuck_before_the_first_step(tmp_path: Path) -> None:
    """While files may take an hour, and the others make groups of ranks."""
    limits = {"comm__init_timeout_seconds": 4, "comm__files_timeout_seconds": 3600}
    given = words(tmp_path, training__local_batch_size=4, **limits)

    def body(rank: int) -> None:
        if rank == 1:
            run_module.settle_zero_stage = lambda *given: stuck_in_a_loop()
        train(given)

    started = time.monotonic()
    ended = fork_ranks(body, 2, tmp_path, 40)
    assert [rank.status for rank in ended] == [1, 1] and time.monotonic() - started < 25
    assert "the run hangs: 1 of 2 ranks wait, rank 1 did not come" in ended[0].stderr
    assert "stuck_in_a_loop" in ended[0].stderr


def test_an_error_on_one_rank_with_tensor_parallel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_that_ends(tmp_path, broken, parallelism__tensor_parallel_degree=2)
    assert [rank.status for rank in ended] == [1, 1]
    assert "ArithmeticError" in ended[1].stderr
    assert main(["diagnose", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["culprits"]) == ("raised", [1])
    assert (
        "rank 1 failed in step 2: ArithmeticError" in found["text"]
        and "a number went missing" in found["text"]
    )
    assert "rank 0 waits in" in found["text"] and " of tp (ranks 0, 1)" in found["text"]


def _run_and_count(given: list[str]) -> tuple[int, int]:
    ring: list[int] = []
    original = watchdog_module.Watchdog.stop

    def stop(self: watchdog_module.Watchdog) -> None:
        ring.append(len(self.recorder.ring))
        original(self)

    watchdog_module.Watchdog.stop = stop  # type: ignore[method-assign]
    return train(given), ring[0]


def _cost_of_a_call(folder: Path) -> float:
    """Seconds that recording adds to a collective."""
    # what sends nothing wakes no other threads, whose cost is no matter of recording and differs from call to call
    x, group = torch.ones(8), dist.new_group(backend="fake")

    def seconds(times: int = 300) -> float:
        start = time.thread_time()  # of this thread: other programs do not count
        for _ in range(times):
            dist.all_reduce(x, group=group)
        return (time.thread_time() - start) / times

    seconds()
    recorder = FlightRecorder(1000)
    recorder.last = LastCall(folder / "page")
    gc.disable()  # as in a run, where collections wait for the end of a step
    bare, recorded = [], []
    for _ in range(15):
        bare.append(seconds())
        with recorder:
            recorded.append(seconds())
    return min(recorded) - min(bare)  # what disturbs only adds


def test_what_it_costs(tmp_path: Path) -> None:
    """Less than 1% of a step, even of a model this small; and a healthy run leaves nothing."""
    (cost,) = run_ranks(_cost_of_a_call, 1, tmp_path)
    statuses = run_ranks(_run_and_count, 2, words(tmp_path, training__local_batch_size=4), timeout=100)
    assert [status for status, _ in statuses] == [0, 0]
    assert not (tmp_path / "run" / "comm_traces").exists()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step = min(line["time_step"] for line in lines)
    calls = statuses[0][1] / len(lines)
    share = calls * cost / step
    print(f"{calls:.0f} calls a step of {step * 1e3:.1f} ms, {cost * 1e6:.2f} us each: {share:.3%}")
    assert share < 0.01
