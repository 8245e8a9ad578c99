"""Whole runs with pipeline ranks through `titan5d train`: the log shows the same numbers as one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.test_runs import SAME, run, write_rows

KEYS = {
    "model__n_layers": 5,
    "training__steps": 3,
    "validation__enable": "true",
    "validation__dataset": "tokens",
    "validation__seq_len": 32,
    "validation__local_batch_size": 4,
    "validation__freq": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", valid=[3, 31, 1, 20, 32, 2, 7, 15])
    return tmp_path


def test_the_log_is_that_of_one_process_on_straight_and_v_shaped_schedules(folder: Path) -> None:
    keys = {**KEYS, "validation__dataset_path": folder / "rows.jsonl"}
    statuses, expected = run(folder, "one", **keys)
    assert statuses == [0]
    layouts = {
        "1F1B": {"parallelism__pipeline_parallel_layout": "E,t*4|t,N,H"},
        "ZBVZeroBubble": {"parallelism__data_parallel_shard_degree": 2, "profiling__pipeline_trace": "true"},
    }
    for name, more in layouts.items():
        ranks = 2 * int(more.get("parallelism__data_parallel_shard_degree", 1))
        more = {**more, "parallelism__pipeline_parallel_schedule": name}
        statuses, found = run(
            folder, name, ranks, **keys, parallelism__pipeline_parallel_degree=2, **more
        )
        assert statuses == [0] * ranks
        assert len(found) == len(expected) == 3
        for ours, theirs in zip(found, expected, strict=True):
            for key in SAME:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (name, key)
            assert ours.get("validation_loss") == pytest.approx(theirs.get("validation_loss"), rel=1e-6)
    assert all(0 < line["pipeline_bubble"] < 1 for line in found)
    traces = folder / "ZBVZeroBubble" / "profile_traces" / "pipeline" / "step-3"
    assert len(list(traces.glob("rank-*.json"))) == 4
    assert (traces / "timeline.svg").exists()


def test_what_cannot_work_is_refused_before_any_rank_joins(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    statuses, lines = run(folder, "refused", 2, parallelism__pipeline_parallel_degree=2, model__n_layers=1,
                          parallelism__pipeline_parallel_schedule="ZBVZeroBubble")  # fmt: skip
    assert statuses == [2, 2]
    assert lines == []
    assert "model.n_layers = 1 is too few for 4 stages" in capfd.readouterr().err
