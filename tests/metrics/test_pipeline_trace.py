"""The measured timeline of a run: files, metric, and that waiting counts as idle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.parallel.sleeping_stages import SEQ, sleeping_pipeline
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.pipeline_trace import PipelineTrace
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline_schedule import StageInput
from titan5d.schedules import catalog
from titan5d.schedules.simulate import StageTimes, simulate
from titan5d.topology import Topology


def traced(folder: Path) -> list[dict[str, float]]:
    meshes = Meshes(Topology(pp=2), "cpu")
    schedule = catalog.build("1F1B", 2, 1, 4)
    pipeline = sleeping_pipeline(schedule, meshes, 0.03, 0.03, 0.03)
    trace = PipelineTrace(schedule, pipeline.groups.down, torch.device("cpu"), folder)
    pipeline.trace = trace
    zeros = torch.zeros(1, SEQ, dtype=torch.int64)
    found = []
    for step in (1, 2):
        pipeline.step([StageInput(zeros, zeros, None, zeros)] * 4, lambda loss_sum: loss_sum)
        found.append(trace.write(step))
    found.append(trace.write(3))  # no slot ran since
    return found


def test_a_run_is_measured_and_drawn(tmp_path: Path) -> None:
    first, second = run_ranks(traced, 2, tmp_path, timeout=60)
    assert first == second
    table = catalog.build("1F1B", 2, 1, 4)
    law = simulate(table, StageTimes.even(table, 1, 1, 1)).bubble_fraction  # (p - 1) / (m + p - 1) = 1/5
    assert first[-1] == {}
    for step in (1, 2):
        bubble = first[step - 1]["pipeline_bubble"]
        assert bubble == pytest.approx(law, abs=0.1)
        folder = tmp_path / "pipeline" / f"step-{step}"
        names = {"rank-0.json", "rank-1.json", "timeline.json", "timeline.svg"}
        assert {file.name for file in folder.iterdir()} == names
        merged = json.loads((folder / "timeline.json").read_text())
        assert merged["bubble"] == bubble
        for rank in (0, 1):
            own = json.loads((folder / f"rank-{rank}.json").read_text())
            assert own["slots"] == merged["ranks"][rank]
            assert [slot["slot"] for slot in own["slots"]] == [str(slot) for slot in table.rows[rank]]
            ends = [0.0, *(slot["end"] for slot in own["slots"])]
            for slot, before in zip(own["slots"], ends, strict=False):
                assert before <= slot["start"] < slot["end"]
                assert slot["end"] - slot["start"] >= (0.03 if "F" in slot["slot"] else 0.06)
        assert (folder / "timeline.svg").read_text().startswith("<svg")
    assert not (tmp_path / "pipeline" / "step-3").exists()
