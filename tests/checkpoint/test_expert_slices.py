"""Experts cut in slices: saved, loaded on other cuts, exported, stepped by optimizers that look at whole matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.runs import assert_same_tensors, metrics, run, tensors

MODEL: dict[str, Any] = {
    "model__name": "mixtral",
    "model__n_layers": 2,
    "model__n_experts": 4,
    "model__moe_ffn_dim": 64,
    "checkpoint__interval": 1,
    "training__local_batch_size": 1,
}
PAR = "parallelism__"
WHOLE: tuple[int, dict[str, Any]] = (1, {})
SLICES = (2, {f"{PAR}expert_tensor_parallel_degree": 2})
BOTH = (4, {f"{PAR}expert_parallel_degree": 2, f"{PAR}expert_tensor_parallel_degree": 2})
SHARDED = (8, BOTH[1])
FEW = (4, {**SLICES[1], "model__n_experts": 3})


def weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in state.items() if not key.startswith("generators.")}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (BOTH, [WHOLE, SLICES]),
        (WHOLE, [BOTH]),
        pytest.param(FEW, [(1, {"model__n_experts": 3})], id="3 experts on 2 shards"),
        pytest.param(SHARDED, [WHOLE, SLICES, BOTH], marks=pytest.mark.slow),
        pytest.param(SLICES, [SHARDED], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_cut_of_experts_loads_any_other(
    tmp_path: Path, saved: tuple[int, dict[str, Any]], loaded: list[tuple[int, dict[str, Any]]]
) -> None:
    """What was loaded is saved again without a step: the same bytes, moments included."""
    ranks, cut = saved
    flags = MODEL | {"training__steps": 1}
    assert run(tmp_path, "saved", ranks, **flags | cut) == [0] * ranks
    expected = weights(tensors(tmp_path, "saved", 1))
    assert "optimizer.exp_avg_sq.layers.0.feed_forward.experts.w2" in expected
    flags |= {
        "checkpoint__initial_load_path": tmp_path / "saved" / "checkpoint" / "step-1",
        "checkpoint__initial_load_model_only": "false",
        "checkpoint__create_seed_checkpoint": "true",
    }
    for number, (ranks, cut) in enumerate(loaded):
        assert run(tmp_path, f"again {number}", ranks, **flags | cut) == [0] * ranks
        assert_same_tensors(weights(tensors(tmp_path, f"again {number}", 1)), expected)


def test_a_run_goes_on_with_its_experts_cut(tmp_path: Path) -> None:
    """Two steps on one process, two with slices: the losses of one that was never stopped."""
    flags = MODEL | {"training__steps": 4, "checkpoint__interval": 2}
    assert run(tmp_path, "straight", 1, **flags) == [0]
    more = {
        "checkpoint__initial_load_path": tmp_path / "straight" / "checkpoint" / "step-2",
        "checkpoint__initial_load_model_only": "false",
    }
    assert run(tmp_path, "slices", 2, **flags | more | SLICES[1]) == [0, 0]
    one, two = metrics(tmp_path, "straight"), metrics(tmp_path, "slices")
    assert sorted(two) == [3, 4]
    for step, line in two.items():
        assert line["loss"] == pytest.approx(one[step]["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(one[step]["grad_norm"], rel=1e-5)


def test_exported_experts_are_whole(tmp_path: Path) -> None:
    flags = MODEL | {"training__steps": 1} | SLICES[1]
    assert run(tmp_path, "ours", 2, **flags) == [0, 0]
    hugging_face = {"checkpoint__last_save_model_only": "true", "checkpoint__last_save_in_hf": "true"}
    assert run(tmp_path, "theirs", 2, **flags | hugging_face) == [0, 0]
    ours = tensors(tmp_path, "ours", 1)
    (file,) = (tmp_path / "theirs" / "checkpoint" / "step-1").glob("*.safetensors")
    exported = load_file(file)
    for layer in range(2):
        for name in ("w1", "w2", "w3"):
            stack = ours[f"model.layers.{layer}.feed_forward.experts.{name}"]
            for expert in range(4):
                key = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight"
                assert torch.equal(exported[key], stack[expert]), key


def test_muon_sees_whole_matrices(tmp_path: Path) -> None:
    """Slices made orthogonal one by one would be another update altogether."""
    flags = MODEL | {"optimizer__name": "Muon", "optimizer__lr": 0.01, "training__steps": 4, "checkpoint__interval": 9}
    assert run(tmp_path, "whole", 1, **flags) == [0]
    assert run(tmp_path, "cut", 4, **flags | BOTH[1]) == [0] * 4
    one, two = metrics(tmp_path, "whole"), metrics(tmp_path, "cut")
    for step, line in one.items():
        assert two[step]["loss"] == pytest.approx(line["loss"], rel=1e-5), step


@pytest.mark.slow
def test_narrow_moments_of_slices(tmp_path: Path) -> None:
    flags = MODEL | {"optimizer__lr": 0.01, "training__steps": 4, "checkpoint__interval": 9}
    narrow = {"optimizer__state_dtype": "float8"}
    assert run(tmp_path, "wide", 2, **flags | SLICES[1]) == [0, 0]
    assert run(tmp_path, "narrow", 2, **flags | SLICES[1] | narrow) == [0, 0]
    wide, found = metrics(tmp_path, "wide"), metrics(tmp_path, "narrow")
    for step, line in wide.items():
        assert found[step]["loss"] == pytest.approx(line["loss"], rel=5e-3)
    assert found[4]["loss"] != wide[4]["loss"], "moments are as wide as ever"
