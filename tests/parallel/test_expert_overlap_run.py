"""Whole runs with overlapped micro-batches: the log of a run without, what a trace shows, a rank that hangs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.launch.forked import fork_ranks
from tests.train.test_runs import SAME, TINY, run, write_rows
from titan5d.__main__ import main
from titan5d.launch import watchdog as watchdog_module
from titan5d.launch.run import train
from titan5d.parallel import pipeline_schedule

KEYS = {
    "model__name": "mixtral",
    "model__n_layers": 4,
    "model__n_experts": 8,
    "model__top_k": 2,
    "model__moe_ffn_dim": 64,
    "training__local_batch_size": 4,
    "training__global_batch_size": 16,
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__data_parallel_shard_degree": 2,
    "parallelism__expert_parallel_degree": 2,
    "parallelism__pipeline_parallel_schedule": "DualPipeV",
    "parallelism__pipeline_parallel_layout": "E,t|t|t|t,N,H",
}
OVERLAP = {"parallelism__pipeline_parallel_expert_parallel_overlap": "true"}


@pytest.mark.slow
def test_the_log_is_that_of_a_run_without(tmp_path: Path) -> None:
    """Bit by bit, with phases that add up to no more than the step; a profile has what the second thread did."""
    write_rows(tmp_path / "rows.jsonl", valid=[3, 31, 1, 20, 32, 2, 7, 15])
    statuses, expected = run(tmp_path, "without", 4, **KEYS)
    profiled = {
        "profiling__enable_profiling": "true",
        "profiling__profile_freq": 3,
        "profiling__profiler_warmup": 1,
        "profiling__pipeline_trace": "true",
    }
    others, found = run(tmp_path, "with", 4, **KEYS, **OVERLAP, **profiled)
    assert statuses == others == [0] * 4
    assert len(found) == len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert [ours[key] for key in SAME] == [theirs[key] for key in SAME]
        assert 0 < ours["pipeline_bubble"] < 1
    phases = [value for name, value in found[-1].items() if name.startswith("time_") and "/" not in name]
    assert len(phases) >= 4

    trace = json.loads((tmp_path / "with" / "profile_traces" / "step-3" / "rank-0.json").read_text())
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X"]
    flights = {one["tid"] for one in events if "_GiveBackBackward" in one["name"]}
    assert len(flights) >= 2  # in the main thread, and in those of the overlapped slots
    timeline = json.loads(
        (tmp_path / "with" / "profile_traces" / "pipeline" / "step-3" / "timeline.json").read_text()
    )
    assert any("OVERLAP_F_B" in slot["slot"] for slot in timeline["ranks"][0])


def run_that_fails(folder: Path, backward: Any, more: dict[str, object]) -> list[Any]:
    """How the 4 ranks of a run end whose backward in the pipeline is `backward`: none of them well."""
    keys = {**TINY, **{key.replace("__", "."): value for key, value in (KEYS | OVERLAP).items()}, **more}
    keys |= {"training.dataset_path": write_rows(folder / "rows.jsonl"), "job.dump_folder": folder / "run"}
    (folder / "empty.toml").write_text("")
    words = ["--config", str(folder / "empty.toml"), *(f"--{key}={value}" for key, value in keys.items())]

    def body(rank: int) -> None:
        pipeline_schedule._Pass._differentiate = backward  # type: ignore[method-assign]
        train(words)

    ended = fork_ranks(body, 4, folder, 60)
    assert [rank.status for rank in ended] == [1] * 4
    return ended


def test_a_rank_that_hangs_in_an_overlapped_slot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both places of its Python are said, and which collective the others stand in."""
    monkeypatch.setattr(watchdog_module, "GRACE", 2.0)
    differentiate, steps = pipeline_schedule._Pass._differentiate, list[Any]()

    def stuck_beside_a_forward(self: Any, action: Any) -> None:
        if not any(self is step for step in steps):
            steps.append(self)
        # from the third step on, when the limit is that of training
        while self.pipeline.turns._pair is not None and dist.get_rank() == 1 and len(steps) == 3:
            time.sleep(0.05)
        differentiate(self, action)

    run_that_fails(tmp_path, stuck_beside_a_forward, {"comm.train_timeout_seconds": 2})
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "rank 1 did not come" in text and "all_to_all" in text
    stands, _, beside = text.partition("and, for the other micro-batch of an overlapped slot, at")
    assert "expert_dispatch.py" in stands and "models/moe.py" in stands
    assert "stuck_beside_a_forward" in beside


def test_an_error_in_the_second_thread_is_the_error_of_the_run(tmp_path: Path) -> None:
    differentiate = pipeline_schedule._Pass._differentiate

    def broken_beside_a_forward(self: Any, action: Any) -> None:
        if self.pipeline.turns._pair is not None and dist.get_rank() == 1:
            raise ArithmeticError("a number went missing")
        differentiate(self, action)

    ended = run_that_fails(tmp_path, broken_beside_a_forward, {})
    assert "ArithmeticError: a number went missing" in ended[1].stderr
    assert "broken_beside_a_forward" in ended[1].stderr
