"""The comparison itself: what it calls equal, what a breach, and where it says it is."""

from __future__ import annotations

import math

import pytest
import torch

from titan5d.verify.compare import Check, Outcome, compare_metrics, compare_tensors, worst_of

LINE = {"loss": 2.0, "max_loss": 3.0, "grad_norm": 0.5, "lr": 1.0, "tokens": 64, "valid_tokens": 40}


def outcome(**changes: torch.Tensor) -> Outcome:
    tensors = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.5])} | changes
    return Outcome(gradients=dict(tensors), weights={"a": torch.ones(2)})


def test_equal() -> None:
    checks = [*compare_tensors(outcome(), outcome(), 0), *compare_metrics([LINE], [LINE])]
    assert all(check.ok and check.error == 0 for check in checks)
    assert {check.name for check in checks} == {"gradients", "weights", "loss", "max_loss", "norm", "metrics"}


def test_an_error_is_relative_to_the_largest_element_and_names_the_parameter() -> None:
    found = outcome(a=torch.tensor([1.0004, -4.0]))
    check = compare_tensors(found, outcome(), 3)[0]
    assert not check.ok and check.error == pytest.approx(1e-4, rel=1e-3) and check.where == "a (rank 3)"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"c": torch.ones(1)}, "c (not in the reference, rank 0)"),
        ({"a": torch.ones(3)}, "a (rank 0)"),
        ({"a": torch.tensor([math.nan, 1.0])}, "a (rank 0)"),
    ],
    ids=["more", "shape", "nan"],
)
def test_what_is_no_number_is_a_breach(changes: dict[str, torch.Tensor], said: str) -> None:
    check = compare_tensors(outcome(**changes), outcome(), 0)[0]
    assert not check.ok and check.where == said


def test_a_missing_parameter_is_a_breach() -> None:
    found = outcome()
    del found.gradients["b"]
    check = compare_tensors(found, outcome(), 0)[0]
    assert not check.ok and check.where == "b (missing, rank 0)"


def test_a_gradient_of_rounding_alone_is_no_breach_but_a_lost_one_is() -> None:
    """Beside gradients of 4, 1e-9 is rounding; 1e-6 that was doubled is not."""
    tiny = {"c": torch.tensor([1e-9])}
    assert compare_tensors(outcome(c=torch.tensor([-1e-9])), outcome(**tiny), 0)[0].ok
    assert not compare_tensors(outcome(c=torch.tensor([2e-6])), outcome(c=torch.tensor([1e-6])), 0)[0].ok


def test_numbers_of_the_log() -> None:
    wrong = [
        ("loss", {"loss": 2.0 + 3e-6}),
        ("max_loss", {"max_loss": "NaN"}),
        ("norm", {"grad_norm": 0.50001}),
        ("metrics", {"valid_tokens": 41}),
        ("metrics", {"lr": None}),
    ]
    for name, change in wrong:
        bad = [check for check in compare_metrics([LINE, LINE | change], [LINE, LINE]) if not check.ok]
        assert [check.name for check in bad] == [name] and "step 2" in bad[0].where
    assert all(check.ok for check in compare_metrics([LINE | {"loss": 2.0 + 1e-7}], [LINE]))
    assert not compare_metrics([LINE], [LINE, LINE])[0].ok


def test_router_metrics_and_buffers() -> None:
    line = LINE | {"moe/layer_0/dropped": 0}
    assert [
        check.name for check in compare_metrics([LINE | {"moe/layer_0/dropped": 1}], [line]) if not check.ok
    ] == ["routers"]
    mine, theirs = outcome(), outcome()
    mine.routers, theirs.routers = {"bias": torch.tensor([1.0])}, {"bias": torch.tensor([1.0 + 1e-7])}
    assert not compare_tensors(mine, theirs, 0)[2].ok  # bit by bit


def test_graphs_after_the_second_step_and_breaks() -> None:
    found = outcome()
    found.graphs = [2, 2, 2]
    assert compare_tensors(found, outcome(), 0)[-1].ok
    found.graphs = [2, 2, 3]
    assert not compare_tensors(found, outcome(), 0)[-1].ok
    found.graphs, found.graph_breaks = [2, 2, 2], 1
    assert not compare_tensors(found, outcome(), 0)[-1].ok


def test_the_worst_is_the_farthest_over_its_own_tolerance() -> None:
    exact, rounded = Check("routers", 1e-7, "bias", 0.0), Check("routers", 5e-6, "entropy", 1e-5)
    assert worst_of([rounded, exact])["routers"] is exact
    lost = Check("routers", math.nan, "load", 1e-5)
    assert worst_of([exact, lost])["routers"] is lost
