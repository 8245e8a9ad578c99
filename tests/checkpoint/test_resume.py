"""Interrupted runs continue: bitwise on the same layout, within rounding on any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.runs import assert_same_tensors, metrics, run, tensors

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "zero3 x4": (4, {"parallelism__zero_stage": 3}),
    "tp2 x pp2": (
        4,
        {
            "parallelism__tensor_parallel_degree": 2,
            "parallelism__pipeline_parallel_degree": 2,
            "parallelism__pipeline_parallel_schedule": "1F1B",
        },
    ),
    "zero1 x2": (2, {"parallelism__zero_stage": 1}),
    "pp2 interleaved": (
        2,
        {
            "parallelism__pipeline_parallel_degree": 2,
            "parallelism__pipeline_parallel_schedule": "Interleaved1F1B",
        },
    ),
    "hsdp 2x2": (4, {"parallelism__data_parallel_replicate_degree": 2}),
    "tp2": (2, {"parallelism__tensor_parallel_degree": 2}),
    "cp2": (2, {"parallelism__context_parallel_degree": 2}),
}
"""Ranks, and what cuts the run over them."""


@pytest.mark.parametrize("layout", ["zero3 x4", "tp2 x pp2"])
def test_interrupted_on_one_layout_is_bitwise_the_same(tmp_path: Path, layout: str) -> None:
    """Interrupted twice; also cases 017 and 049: a tied model, and each rank its own random generators."""
    ranks, flags = LAYOUTS[layout]
    flags = {**flags, "model__tie_embeddings": "true", "checkpoint__interval": 2}
    assert run(tmp_path, "straight", ranks, **flags) == [0] * ranks
    for steps in (2, 4, 6):
        assert (
            run(
                tmp_path,
                "interrupted",
                ranks,
                **{**flags, "training__steps": steps, "lr_scheduler__total_steps": 6},
            )
            == [0] * ranks
        )
    one, two = metrics(tmp_path, "straight"), metrics(tmp_path, "interrupted")
    assert sorted(one) == sorted(two) == [1, 2, 3, 4, 5, 6]
    for step, line in one.items():
        for key in ("loss", "max_loss", "grad_norm", "lr", "n_tokens_seen", "consumed_samples"):
            assert line[key] == two[step][key], (step, key)
    one, two = tensors(tmp_path, "straight", 6), tensors(tmp_path, "interrupted", 6)
    assert_same_tensors(one, two)
    assert "model.output.weight" not in one and "optimizer.exp_avg.tok_embeddings.weight" in one
    states = [one[f"generators.{rank}.torch"] for rank in range(ranks)]
    assert not any(torch.equal(states[0], other) for other in states[1:])
    for rank in range(ranks):
        lines = (tmp_path / "interrupted" / f"samples-rank{rank}.jsonl").read_text()
        assert lines == (tmp_path / "straight" / f"samples-rank{rank}.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_moves_from_layout_to_layout(tmp_path: Path) -> None:
    """Case 050: one step on each of eight layouts; the losses are those of one process that was never stopped."""
    steps = len(LAYOUTS)
    flags: dict[str, Any] = {"lr_scheduler__total_steps": steps, "checkpoint__interval": 1}
    assert run(tmp_path, "straight", 1, training__steps=steps, **flags) == [0]
    for step, (ranks, cut) in enumerate(LAYOUTS.values(), 1):
        assert run(tmp_path, "moves", ranks, training__steps=step, **flags, **cut) == [0] * ranks
    one, two = metrics(tmp_path, "straight"), metrics(tmp_path, "moves")
    for step in one:
        assert two[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-6), step
        assert two[step]["consumed_samples"] == one[step]["consumed_samples"]
    final, expected = tensors(tmp_path, "moves", steps), tensors(tmp_path, "straight", steps)
    for key, tensor in expected.items():
        if key.startswith("model."):
            assert (final[key] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), key


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_loaded_on_another_layout_is_bitwise_what_was_saved(tmp_path: Path) -> None:
    """With a learning rate of 0 a step changes no weight, so the next save must hold the same bytes."""
    flags: dict[str, Any] = {"checkpoint__interval": 1, "optimizer__weight_decay": 0, "optimizer__lr": 1e-3}
    for name in ("zero3 x4", "tp2 x pp2", "hsdp 2x2"):
        ranks, cut = LAYOUTS[name]
        folder = f"run {name}"
        assert run(tmp_path, folder, ranks, training__steps=1, **flags, **cut) == [0] * ranks
        saved = tensors(tmp_path, folder, 1)
        for other in ("1", "zero1 x2"):
            ranks, cut = LAYOUTS[other]
            still = {**flags, "optimizer__lr": 0, "checkpoint__load_step": 1}
            assert run(tmp_path, folder, ranks, training__steps=2, **still, **cut) == [0] * ranks
            found = tensors(tmp_path, folder, 2)
            for key, tensor in saved.items():
                if key.startswith("model."):
                    assert torch.equal(found[key], tensor), (name, other, key)
