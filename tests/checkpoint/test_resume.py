"""Interrupted runs continue: bitwise on the same layout, within rounding on any other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.runs import assert_same_tensors, metrics, run, tensors, words
from titan5d.__main__ import main
from titan5d.launch.local_ranks import run_ranks
from titan5d.launch.run import train
from titan5d.train import trainer

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
    "zero0 x2": (2, {"parallelism__zero_stage": 0}),
    "zero2 x2": (2, {"parallelism__zero_stage": 2, "training__local_batch_size": 1}),
    "cp2": (2, {"parallelism__context_parallel_degree": 2}),
}
"""Ranks, and what cuts the run over them."""
EIGHT_RANKS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3 x8": (8, {"parallelism__zero_stage": 3}),
    "zero3 x4, tp2": (8, {"parallelism__zero_stage": 3, "parallelism__tensor_parallel_degree": 2}),
}


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
    """Case 050: one step on each of ten layouts; the losses are those of one process that was never stopped."""
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


def load_and_save_again(tmp_path: Path, saved: str, loaded: str, **model: Any) -> None:
    """What a layout has loaded, it saves again without a step: the same bytes, moments included."""
    layouts = LAYOUTS | EIGHT_RANKS
    ranks, cut = layouts[saved]
    flags: dict[str, Any] = {"checkpoint__interval": 1, "training__steps": 1, **model}
    source = tmp_path / saved / "checkpoint" / "step-1"
    if not source.exists():
        assert run(tmp_path, saved, ranks, **flags, **cut) == [0] * ranks
    ranks, cut = layouts[loaded]
    flags |= {"checkpoint__initial_load_path": source, "checkpoint__initial_load_model_only": "false"}
    flags["checkpoint__create_seed_checkpoint"] = "true"
    assert run(tmp_path, f"{saved} to {loaded}", ranks, **flags, **cut) == [0] * ranks
    found, expected = tensors(tmp_path, f"{saved} to {loaded}", 1), tensors(tmp_path, saved, 1)
    state = {key: tensor for key, tensor in expected.items() if not key.startswith("generators.")}
    assert_same_tensors(state, {key: found[key] for key in found if not key.startswith("generators.")})
    assert any(key.startswith("optimizer.exp_avg_sq.") for key in state)


@pytest.mark.parametrize("loaded", [pytest.param("1", marks=pytest.mark.slow), "tp2 x pp2"])
def test_what_is_loaded_on_another_layout_is_bitwise_what_was_saved(tmp_path: Path, loaded: str) -> None:
    load_and_save_again(tmp_path, "hsdp 2x2", loaded)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_loads_every_layout(tmp_path: Path, saved: str) -> None:
    """Case 050."""
    for loaded in LAYOUTS:
        load_and_save_again(tmp_path, saved, loaded)


def test_shards_of_less_than_a_row(tmp_path: Path) -> None:
    """Case 024: 3 experts and 60 rows of a matrix over 4 x 2 and over 8 ranks, some of which hold nothing."""
    odd = {"name": "mixtral", "n_layers": 2, "dim": 60, "n_heads": 6, "n_kv_heads": 2, "n_experts": 3}
    odd |= {"moe_ffn_dim": 30, "head_dim": 10}
    model = {f"model__{key}": value for key, value in odd.items()} | {"training__local_batch_size": 1}
    for loaded in ("1", "zero3 x8"):
        load_and_save_again(tmp_path, "zero3 x4, tp2", loaded, **model)


def test_a_tied_model_goes_on_with_more_ranks(tmp_path: Path) -> None:
    """Cases 017 and 050: saved by 2 ranks, continued by 4; the optimizer's state of the shared matrix goes along."""
    flags: dict[str, Any] = {"model__n_layers": 2, "model__tie_embeddings": "true", "parallelism__zero_stage": 3}
    assert run(tmp_path, "straight", 2, **flags) == [0, 0]
    more = {**flags, "checkpoint__initial_load_path": tmp_path / "straight" / "checkpoint" / "step-3"}
    assert run(tmp_path, "goes on", 4, **more, checkpoint__initial_load_model_only="false") == [0] * 4
    one, two = metrics(tmp_path, "straight"), metrics(tmp_path, "goes on")
    assert sorted(two) == [4, 5, 6]
    assert all(two[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5) for step in two)


def test_an_odd_vocabulary_leaves_tensor_parallelism_as_it_came(tmp_path: Path) -> None:
    """Case 021: 259 rows on 2 tensor ranks: exported without padding, continued by one process."""
    flags: dict[str, Any] = {"model__n_layers": 2, "checkpoint__interval": 2, "training__steps": 4}
    assert run(tmp_path, "tp", 2, **flags, parallelism__tensor_parallel_degree=2) == [0, 0]
    saved = tmp_path / "tp" / "checkpoint" / "step-2"
    assert main(["convert", "to-hf", str(saved), str(tmp_path / "hf"), "--tokenizer", "bytes"]) == 0
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    exported = load_file(file)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert exported[name].shape == (259, 64)
    more = {**flags, "checkpoint__initial_load_path": saved, "checkpoint__initial_load_model_only": "false"}
    assert run(tmp_path, "alone", 1, **more) == [0]
    one, two = metrics(tmp_path, "tp"), metrics(tmp_path, "alone")
    assert sorted(two) == [3, 4]
    assert all(two[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5) for step in two)


def test_experts_and_their_biases(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "model__name": "mixtral",
        "model__n_layers": 2,
        "model__n_experts": 4,
        "model__moe_ffn_dim": 64,
        "moe__bias_update_rate": 0.01,
        "moe__aux_loss_coefficient": 0.01,
        "moe__aux_loss_kind": "global_batch",
        "training__steps": 4,
        "checkpoint__interval": 2,
    }
    assert run(tmp_path, "straight", 2, **flags) == [0, 0]
    assert run(tmp_path, "stopped", 2, **{**flags, "training__steps": 2}, lr_scheduler__total_steps=4) == [
        0,
        0,
    ]
    assert run(tmp_path, "stopped", 2, **flags) == [0, 0]
    one, two = tensors(tmp_path, "straight", 4), tensors(tmp_path, "stopped", 4)
    assert_same_tensors(one, two)
    assert one["model.layers.0.feed_forward.router.bias"].abs().max() > 0
    assert one["model.layers.1.feed_forward.router.load"].sum() > 0
    found = {step: line["loss"] for step, line in metrics(tmp_path, "stopped").items()}
    assert found == {step: line["loss"] for step, line in metrics(tmp_path, "straight").items()}


def draws(words: list[str]) -> int:
    """Trains; every step draws from all generators, as dropout would."""
    step = trainer.train_step

    def with_draws(*args: Any, **kwargs: Any) -> Any:
        torch.rand(3)
        random.gauss(0, 1)
        np.random.standard_normal()
        return step(*args, **kwargs)

    trainer.train_step = with_draws
    return train(words)


def test_every_rank_gets_its_own_generators_back(tmp_path: Path) -> None:
    """Case 049."""
    flags: dict[str, Any] = {"model__n_layers": 2, "training__steps": 3, "checkpoint__interval": 1}
    assert run_ranks(draws, 2, words(tmp_path, "straight", **flags), timeout=100) == [0, 0]
    for steps in (1, 3):
        more = {**flags, "training__steps": steps, "lr_scheduler__total_steps": 3}
        assert run_ranks(draws, 2, words(tmp_path, "stopped", **more), timeout=100) == [0, 0]
    one, two = tensors(tmp_path, "straight", 3), tensors(tmp_path, "stopped", 3)
    assert_same_tensors(one, two)
    fields = ("torch", "numpy", "numpy_gauss", "python", "python_gauss")
    for field in fields:
        mine = [two[f"generators.{rank}.{field}"] for rank in range(2)]
        earlier = tensors(tmp_path, "straight", 2)[f"generators.0.{field}"]
        assert not torch.equal(mine[0], mine[1]) and not torch.equal(mine[0], earlier), field


@pytest.mark.parametrize("optimizer", ["Muon", pytest.param("SGD", marks=pytest.mark.slow)])
def test_other_optimizers(tmp_path: Path, optimizer: str) -> None:
    flags: dict[str, Any] = {
        "model__n_layers": 2,
        "optimizer__name": optimizer,
        "optimizer__momentum": 0.9,
        "training__steps": 4,
        "checkpoint__interval": 2,
    }
    assert run(tmp_path, "straight", 2, **flags) == [0, 0]
    assert run(tmp_path, "stopped", 2, **{**flags, "training__steps": 2}, lr_scheduler__total_steps=4) == [
        0,
        0,
    ]
    assert run(tmp_path, "stopped", 2, **flags) == [0, 0]
    one = tensors(tmp_path, "straight", 4)
    assert_same_tensors(one, tensors(tmp_path, "stopped", 4))
    assert "optimizer.momentum_buffer.layers.0.attention.wq.weight" in one
