"""What the overlap of two micro-batches needs, and what a run without it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.test_check_expert import ARGS
from titan5d.config.check import Layout, check
from titan5d.config.load import ConfigError
from titan5d.config.schema import Config
from titan5d.schedules import catalog
from titan5d.schedules.csv import write_csv
from titan5d.schedules.table import Overlap


def checked(ranks: int = 4, rows: int = 8, **keys: object) -> Layout:
    config = Config()
    config.validation.enable = False
    config.training.local_batch_size = rows
    wanted: dict[str, object] = {
        "pipeline_parallel_expert_parallel_overlap": True,
        "pipeline_parallel_schedule": "DualPipeV",
        "pipeline_parallel_degree": 2,
        "expert_parallel_degree": 2,
    }
    for key, value in (wanted | keys).items():
        setattr(config.parallelism, key, value)
    return check(config, ARGS, ranks)


def problem(rows: int = 8, **keys: object) -> str:
    with pytest.raises(ConfigError) as error:
        checked(4, rows, **keys)
    (found,) = error.value.problems
    assert "pipeline_parallel_expert_parallel_overlap = true" in found
    assert found.endswith(("leave the key out", "leave it out"))
    return found


def test_what_fits() -> None:
    plan = checked().pipeline
    assert plan is not None and plan.overlaps_experts and plan.has_overlaps
    plan = checked(pipeline_parallel_expert_parallel_overlap=False).pipeline
    assert plan is not None and not plan.overlaps_experts


@pytest.mark.parametrize("key", ["pipeline_parallel_degree", "expert_parallel_degree"])
def test_a_cut_that_is_missing(key: str) -> None:
    found = problem(**{key: 1})
    assert f"{key} = 1" in found and "set both to 2 or more" in found


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_another_schedule(name: str) -> None:
    found = problem(pipeline_parallel_schedule=name)
    assert f"pipeline_parallel_schedule = {name!r}" in found and "use 'DualPipeV'" in found


def test_too_few_micro_batches() -> None:
    """The number that is named is the least that works."""
    found = problem(rows=2)
    assert "from 3 micro-batches on" in found and "has 2 of 1 rows" in found
    assert "global_batch_size to 8 or more" in found  # 3 are not whole local batches of 2, and there are 2 pipelines
    assert checked(rows=3).pipeline is not None
    assert "global_batch_size to 16 or more" in problem(rows=4, pipeline_parallel_microbatch_size=2)


def test_a_table_from_a_file(tmp_path: Path) -> None:
    for name in ("DualPipeV", "ZBVZeroBubble"):
        write_csv(catalog.build(name, 2, 2, 8), tmp_path / name)
    plan = checked(
        pipeline_parallel_schedule_csv=str(tmp_path / "DualPipeV"), pipeline_parallel_schedule=""
    ).pipeline
    assert plan is not None and plan.overlaps_experts
    found = problem(pipeline_parallel_schedule_csv=str(tmp_path / "ZBVZeroBubble"))
    assert "pipeline_parallel_schedule_csv" in found and "OVERLAP_F_B" in found


def test_a_schedule_that_does_not_work_is_one_problem() -> None:
    with pytest.raises(ConfigError) as error:
        checked(pipeline_parallel_schedule="Dual")
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_two_of_a_slot_are_in_different_stages(ranks: int) -> None:
    """What turns need: FSDP2 keeps a stage for one of them at a time."""
    for microbatches in range(1, 4 * ranks):
        for row in catalog.build("DualPipeV", ranks, 2, microbatches).rows:
            for slot in row:
                if isinstance(slot, Overlap):
                    assert slot.forward.stage != slot.backward.stage
                    assert slot.forward.microbatch != slot.backward.microbatch
