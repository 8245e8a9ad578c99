"""Traces of a run, and snapshots of an allocator that stands in for CUDA's."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_runs import run, write_rows
from titan5d.config.check_device import feature_problems
from titan5d.config.check_values import value_problems
from titan5d.config.schema import Config
from titan5d.config.schema_execution import Profiling
from titan5d.metrics.profiling import Profiler


def test_a_run_writes_traces_that_name_its_phases(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    flags: dict[str, Any] = {"profile_freq": 2, "profiler_warmup": 1, "enable_profiling": "true"}
    statuses, _ = run(tmp_path, "traced", 2, **{f"profiling__{key}": value for key, value in flags.items()})
    assert statuses == [0, 0]
    traces = sorted(
        path.relative_to(tmp_path / "traced") for path in (tmp_path / "traced").rglob("rank-*.json")
    )
    names = [f"profile_traces/step-{step}/rank-{rank}.json" for step in (2, 4) for rank in (0, 1)]
    assert [str(path) for path in traces] == names
    for path in traces:
        events = json.loads((tmp_path / "traced" / path).read_text())["traceEvents"]
        found = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
        # one step of two micro-batches
        assert [found.count(phase) for phase in ("forward", "backward", "optimizer")] == [2, 2, 1]


class _Allocator:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self.calls.append(f"record {enabled}")

    def dump(self, path: str) -> None:
        Path(path).write_text("")
        self.calls.append(path)


def test_snapshots_are_written_on_time_and_when_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = _Allocator()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", allocator.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", allocator.dump)
    config = Profiling(enable_memory_snapshot=True, profile_freq=2)
    profiler = Profiler(config, tmp_path, torch.device("cpu"), rank=3, step=0)
    with suppress(torch.OutOfMemoryError), profiler:
        for step in (1, 2, 3):
            profiler.after_step(step)
        raise torch.OutOfMemoryError
    folder = tmp_path / "memory_snapshot"
    expected = [folder / "step-2/rank-3.pickle", folder / "step-4-out-of-memory/rank-3.pickle"]
    assert allocator.calls == ["record all", *map(str, expected), "record None"]


def test_a_cpu_has_no_snapshots() -> None:
    config = Config(profiling=Profiling(enable_memory_snapshot=True))
    assert feature_problems(config, "cuda") == feature_problems(Config(), "cpu") == []
    (problem,) = feature_problems(config, "cpu")
    assert "profiling.enable_memory_snapshot = true" in problem and "on cpu" in problem


@pytest.mark.parametrize(
    ("profiling", "why"),
    [
        (Profiling(True, profile_freq=3), "profiler_warmup 3 + profiler_active 1 = 4 steps"),
        (Profiling(True, profiler_active=0), "profiler_active = 0 must be at least 1"),
        (Profiling(True, profile_freq=20_000), "the first trace would be at step 20000"),
    ],
)
def test_traces_that_would_never_be(profiling: Profiling, why: str) -> None:
    assert value_problems(Config(profiling=Profiling(True))) == []
    (problem,) = value_problems(Config(profiling=profiling))
    assert why in problem
