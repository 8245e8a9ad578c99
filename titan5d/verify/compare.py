"""What a run came to, and how far two of them are apart (contract 1).

| check | compared | tolerance |
|---|---|---|
| loss, max_loss | of every step, as logged | 1e-6 |
| gradients | of every parameter by name, whole, clipped, after the first backward, on every rank | 1e-5 |
| norm | of the gradient before clipping, every step, as logged | 1e-5 |
| weights | of every parameter after the last step, on every rank | 1e-5 |
| routers | selection bias and load of every layer bit by bit, all logged `moe/` metrics | 1e-5 |
| metrics | counts of tokens, targets and rows, learning rate, validation loss, as logged | 1e-6 |
| graphs | graphs compiled after the second step, graph breaks (compile.enable) | none |

All relative: numbers to the number itself, tensors to their largest element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

LOSS, GRADIENT = 1e-6, 1e-5
ZERO_BUT_FOR_ROUNDING = 1e-3
"""A gradient that is zero but for rounding (the shares of a single expert, say) has no digits to compare: errors are
relative to no less than this share of the model's largest gradient. A factor missing in one of 1e-7 still shows."""
COUNTS = (
    "tokens",
    "valid_tokens",
    "n_tokens_seen",
    "consumed_samples",
    "skipped_steps",
    "lr",
    "validation_loss",
)

Metrics = Mapping[str, float | str | None]
"""A line of metrics.jsonl."""


@dataclass
class Outcome:
    """What a run did, whole (gathered) on the rank that holds it.

    Attributes:
        metrics: the lines of metrics.jsonl; on rank 0 only.
        gradients: of the first step, clipped, by parameter.
        weights: after the last step.
        routers: selection biases and loads after the last step, by layer.
        graphs: how many graphs were compiled up to the update of each step; empty without compile.
        graph_breaks: how many were counted.
    """

    metrics: list[dict[str, float | str | None]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    routers: dict[str, torch.Tensor] = field(default_factory=dict)
    graphs: list[int] = field(default_factory=list)
    graph_breaks: int = 0


@dataclass(frozen=True)
class Check:
    """The worst that was found of one kind.

    Attributes:
        error: relative; inf where something is missing.
        where: the parameter or metric it occurred in, and on which rank or in which step.
        tolerance: the largest error that is rounding.
    """

    name: str
    error: float
    where: str
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for nan


def compare_metrics(found: Sequence[Metrics], expected: Sequence[Metrics]) -> list[Check]:
    """The checks of what was logged."""
    if len(found) != len(expected):
        lines = f"{len(found)} steps logged instead of {len(expected)}"
        return [Check("metrics", math.inf, lines, LOSS)]
    checks = [
        _worst_metric(name, [key], found, expected, tolerance)
        for name, key, tolerance in (
            ("loss", "loss", LOSS),
            ("max_loss", "max_loss", LOSS),
            ("norm", "grad_norm", GRADIENT),
        )
    ]
    moe = sorted({key for line in (*found, *expected) for key in line if key.startswith("moe/")})
    if moe:
        checks.append(_worst_metric("routers", moe, found, expected, GRADIENT))
    return [*checks, _worst_metric("metrics", COUNTS, found, expected, LOSS)]


def compare_tensors(found: Outcome, expected: Outcome, rank: int) -> list[Check]:
    """The checks of what this rank holds."""
    largest = max((float(grad.abs().max()) for grad in expected.gradients.values()), default=0.0)
    floor = ZERO_BUT_FOR_ROUNDING * largest
    checks = [
        _worst_tensor("gradients", found.gradients, expected.gradients, GRADIENT, rank, floor),
        _worst_tensor("weights", found.weights, expected.weights, GRADIENT, rank),
    ]
    if expected.routers or found.routers:
        checks.append(_worst_tensor("routers", found.routers, expected.routers, 0.0, rank))
    if found.graphs:
        late = found.graphs[-1] - found.graphs[min(1, len(found.graphs) - 1)]
        breaks, graphs = found.graph_breaks, found.graphs[-1]
        what = (
            f"rank {rank}: {late} graphs compiled after step 2, {breaks} graph breaks, {graphs} graphs in all"
        )
        checks.append(Check("graphs", float(late + breaks), what, 0.0))
    return checks


def worst_of(checks: Sequence[Check]) -> dict[str, Check]:
    """By name the check that is farthest over its tolerance, or nearest to it."""
    worst: dict[str, Check] = {}
    for check in checks:
        if check.name not in worst or _excess(check) > _excess(worst[check.name]):
            worst[check.name] = check
    return worst


def relative_error(found: torch.Tensor, expected: torch.Tensor, floor: float = 1e-30) -> float:
    """Largest absolute difference over the largest absolute value, or over `floor` if that is larger."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=max(floor, 1e-30)))


def _excess(check: Check) -> tuple[bool, float]:
    if math.isnan(check.error):
        return True, math.inf
    return not check.ok, check.error / max(check.tolerance, 1e-30)


def _worst_tensor(
    name: str,
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    tolerance: float,
    rank: int,
    floor: float = 1e-30,
) -> Check:
    for one, other, what in ((expected, found, "missing"), (found, expected, "not in the reference")):
        if names := sorted(one.keys() - other.keys()):
            return Check(name, math.inf, f"{names[0]} ({what}, rank {rank})", tolerance)
    errors = {key: relative_error(found[key], expected[key], floor) for key in expected}
    key = max(errors, key=lambda one: math.inf if math.isnan(errors[one]) else errors[one], default="")
    return Check(name, errors.get(key, 0.0), f"{key} (rank {rank})", tolerance)


def _worst_metric(
    name: str, keys: Sequence[str], found: Sequence[Metrics], expected: Sequence[Metrics], tolerance: float
) -> Check:
    worst = Check(name, 0.0, keys[0], tolerance)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        for key in keys:
            error = _number_error(ours.get(key), theirs.get(key))
            if math.isnan(error) or error > worst.error:
                worst = Check(
                    name, error, f"{key} at step {step}: {ours.get(key)} != {theirs.get(key)}", tolerance
                )
    return worst


def _number_error(found: float | str | None, expected: float | str | None) -> float:
    if found == expected:
        return 0.0
    if isinstance(found, str | None) or isinstance(expected, str | None):
        return math.inf
    return abs(found - expected) / max(abs(expected), 1e-30)
