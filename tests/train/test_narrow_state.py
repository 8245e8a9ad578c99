"""Moments in 8 and 4 bits: what they hold, how they are saved, and that they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_optimizer import Section
from tests.train.test_runs import run, write_rows
from titan5d.train.lr_schedule import LRSchedule
from titan5d.train.narrow_state import MOMENTS, narrow_loaded_state, widened
from titan5d.train.optimizer import build_optimizer

pytest.importorskip("torchao", reason="the [ao] extra is not installed")

BYTES = {"int8": 2 * (1 + 4 / 256), "float8": 2 * (1 + 4 / 256), "int4": 2 * (1 / 2 + 4 / 128)}


def _weights() -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(2)
    return [
        ("layers.0.attention.wq.weight", torch.nn.Parameter(torch.randn(64, 128, generator=generator))),
        ("norm.weight", torch.nn.Parameter(torch.ones(128))),
    ]


@pytest.mark.parametrize("state_dtype", BYTES)
def test_what_is_saved_wide_comes_back(state_dtype: str) -> None:
    named = _weights()
    optimizer = build_optimizer(named, Section(state_dtype=state_dtype))  # type: ignore[arg-type]
    weight, norm = (parameter for _, parameter in named)
    generator = torch.Generator().manual_seed(3)
    for parameter in (weight, norm):
        values = torch.randn(parameter.shape, generator=generator)
        optimizer.state[parameter] = {"exp_avg": values * 1e-3, "exp_avg_sq": values.square() * 1e-6}
    narrow_loaded_state(optimizer)
    state = optimizer.state[weight]
    first = {field: widened(state[field]) for field in MOMENTS}
    optimizer.state[weight] = dict(first)
    narrow_loaded_state(optimizer)
    state = optimizer.state[weight]
    for field in MOMENTS:
        assert first[field].abs().sum() > 0
        moved = (widened(state[field]) - first[field]).abs().max() / first[field].abs().max()
        assert moved <= {"float8": 0.0, "int8": 0.02, "int4": 0.25}[state_dtype]
    stored = sum(state[field].codes.nbytes + state[field].scale.nbytes for field in MOMENTS)
    assert stored / weight.numel() == BYTES[state_dtype]
    assert type(optimizer.state[norm]["exp_avg"]) is torch.Tensor, "too small to be worth it"


def test_the_rate_of_a_compiled_update_is_set_in_place() -> None:
    optimizer = build_optimizer(_weights(), Section(state_dtype="int8", lr=0.5))  # type: ignore[arg-type]
    rates = [group["lr"] for group in optimizer.param_groups]

    class Schedule:
        warmup_steps, total_steps, decay_ratio, decay_type, min_lr_factor = 4, None, None, "linear", 0.0

    schedule = LRSchedule(optimizer, Schedule, 8)  # type: ignore[arg-type]
    schedule.set_step(2)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert all(isinstance(rate, torch.Tensor) and float(rate) == 0.25 for rate in rates)
    assert schedule.lr == 0.25


@pytest.mark.slow
def test_a_run_trains_and_continues_with_narrow_moments(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    flags: dict[str, Any] = {
        "optimizer__name": "AdamW",
        "optimizer__lr": 0.01,
        "model__n_layers": 1,
        "training__local_batch_size": 4,
        "checkpoint__last_save_model_only": "false",
    }
    narrow = flags | {
        "optimizer__state_dtype": "float8",
        "checkpoint__enable": "true",
        "checkpoint__interval": 2,
    }
    _, wide = run(tmp_path, "wide", 2, **flags)
    statuses, whole = run(tmp_path, "narrow", 2, **narrow)
    assert statuses == [0, 0]
    losses = [point["loss"] for point in whole]
    assert losses == pytest.approx([point["loss"] for point in wide], rel=5e-3)
    assert losses[1:] != [point["loss"] for point in wide][1:], "moments are as wide as ever"
    source = tmp_path / "narrow" / "checkpoint" / "step-2"
    again = narrow | {"checkpoint__initial_load_path": source, "checkpoint__initial_load_model_only": "false"}
    statuses, continued = run(tmp_path, "continued", 2, **again)
    assert statuses == [0, 0]
    # the same layout and float8: as if it had never stopped
    assert [point["loss"] for point in continued] == losses[2:]
