"""The schedule at its corners against closed forms, and its use on an optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from titan5d.train.lr_schedule import DecayType, LRSchedule, decay_steps, lr_factor

T, W = 100, 10
SHAPES: dict[DecayType, object] = {
    "linear": lambda p: 1 - p,
    "sqrt": lambda p: 1 - math.sqrt(p),
    "cosine": lambda p: 0.5 * (1 + math.cos(math.pi * p)),
}


def test_warmup_is_exact_at_each_step():
    assert lr_factor(0, T, W) == 0.0
    assert lr_factor(1, T, W) == 1 / W
    assert [lr_factor(n, T, W) for n in range(1, W + 1)] == [n / W for n in range(1, W + 1)]


def test_without_warmup_the_first_step_is_at_full_rate():
    assert lr_factor(1, T, 0) == 1.0
    assert lr_factor(0, T, 0) == 1.0


def test_linear_decay_right_after_warmup_is_a_line_to_one_step_behind_the_end():
    # 90 decay steps: step n has (101 - n) / 90 from step 11 on, so step 11 is still full and step 100 is not zero
    assert lr_factor(W, T, W) == 1.0
    for n in range(W + 1, T + 1):
        assert lr_factor(n, T, W) == pytest.approx((T + 1 - n) / 90, rel=1e-12)
    assert lr_factor(T, T, W) == pytest.approx(1 / 90, rel=1e-12)
    assert lr_factor(T + 1, T, W) == 0.0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_warmup_stable_decay(shape: DecayType, floor: float):
    decaying = 20  # 0.2 x 100: step 81 is the last at full rate
    factors = {n: lr_factor(n, T, W, 0.2, shape, floor) for n in range(1, T + 3)}
    assert all(factors[n] == 1.0 for n in range(W, T + 1 - decaying + 1))
    for n in range(T + 1 - decaying, T + 1):
        expected = floor + (1 - floor) * SHAPES[shape]((n - (T + 1 - decaying)) / decaying)  # type: ignore[operator]
        assert factors[n] == pytest.approx(expected, rel=1e-12)
    assert factors[T + 1 - decaying + 1] < 1.0
    assert factors[T] > floor, "the last update must not be made with the floor of zero"
    assert factors[T + 1] == factors[T + 2] == pytest.approx(floor, abs=1e-15)


@pytest.mark.parametrize("shape", SHAPES)
def test_never_rises_after_warmup_and_stays_between_floor_and_one(shape: DecayType):
    for ratio in (None, 0.0, 0.3, 1.0):
        factors = [lr_factor(n, 57, 5, ratio, shape, 0.05) for n in range(5, 80)]
        assert all(later <= earlier for earlier, later in pairwise(factors))
        assert all(0.05 - 1e-15 <= factor <= 1.0 for factor in factors)


def test_how_many_steps_decay():
    assert decay_steps(100, 10, None) == 90
    assert decay_steps(100, 10, 0.25) == 25
    assert decay_steps(100, 10, 0.0) == 0
    assert decay_steps(100, 10, 1.0) == 90  # the warmup has its steps first
    assert decay_steps(5, 10, None) == 0


def test_without_decay_the_rate_stays():
    assert [lr_factor(n, T, 2, 0.0) for n in (2, 50, T, T + 50)] == [1.0] * 4


def test_a_run_cut_short_inside_its_warmup_sees_the_first_rates_of_the_long_one():
    assert [lr_factor(n, 5, 200) for n in range(1, 6)] == [lr_factor(n, 10_000, 200) for n in range(1, 6)]


def test_a_run_of_one_step():
    assert lr_factor(1, 1, 0) == 1.0
    assert lr_factor(1, 1, 1) == 1.0


@dataclass
class Section:
    warmup_steps: int = 4
    total_steps: int | None = None
    decay_ratio: float | None = None
    decay_type: DecayType = "linear"
    min_lr_factor: float = 0.0


def sgd(*rates: float) -> torch.optim.SGD:
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0
    )


def test_sets_every_group_to_its_own_peak_times_the_factor():
    optimizer = sgd(0.8, 0.2)
    schedule = LRSchedule(optimizer, Section(), training_steps=20)
    # Step 1 of a warmup of 4
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.05])
    schedule.set_step(4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.8, 0.2]
    schedule.set_step(20)
    assert schedule.lr == optimizer.param_groups[0]["lr"] == pytest.approx(0.8 / 16)
    schedule.set_step(4)  # a pure function of the step: the order of calls leaves no trace
    assert schedule.lr == 0.8


def test_an_update_moves_by_the_rate_of_its_step():
    optimizer = sgd(1.0)
    (weight,) = optimizer.param_groups[0]["params"]
    schedule = LRSchedule(optimizer, Section(), training_steps=8)
    for n in range(1, 9):
        schedule.set_step(n)
        weight.grad = torch.ones(1)
        optimizer.step()
    assert weight.item() == pytest.approx(-sum(lr_factor(n, 8, 4) for n in range(1, 9)))


def test_total_steps_wins_over_the_length_of_the_run():
    long = LRSchedule(sgd(1.0), Section(total_steps=40), training_steps=20)
    assert long.total_steps == 40
    long.set_step(20)
    assert long.factor == pytest.approx((41 - 20) / 36)


def test_state_is_the_step_and_the_config_rules_over_saved_rates():
    schedule = LRSchedule(sgd(1.0), Section(), training_steps=20)
    schedule.set_step(7)
    optimizer = sgd(0.5)
    other = LRSchedule(optimizer, Section(), training_steps=20)
    optimizer.param_groups[0]["lr"] = 123.0  # as a restored optimizer brings it along
    other.load_state_dict(schedule.state_dict())
    assert other.step == 7
    assert other.lr == pytest.approx(0.5 * lr_factor(7, 20, 4))
