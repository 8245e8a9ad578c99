"""Products in 8 bits against bf16: numerics, ranks, recompute, compile; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import TINY, Case, build_pipeline, micro_batches, pipeline_plan
from tests.train.test_runs import run, write_rows
from titan5d.config.check_device import feature_problems
from titan5d.config.check_precision import layout_precision_problems, precision_problems
from titan5d.config.schema import Config
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.models.decoder import Decoder
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.low_precision import LowPrecision, apply_low_precision, compressed, scale_after_updates
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology
from titan5d.train.step import train_step

pytest.importorskip("torchao", reason="the [ao] extra is not installed")

CPU = torch.device("cpu")
ONE = Case(args=replace(TINY, n_layers=2), dtype=torch.bfloat16, documents=True, lr=0.5)
TENSORWISE = LowPrecision("float8", emulate=True)
ROWWISE = LowPrecision("float8", "rowwise", emulate=True)
PLANS = {
    "tensorwise": TENSORWISE,
    "tensorwise, real": LowPrecision("float8"),
    "rowwise": ROWWISE,
    "rowwise, real": LowPrecision("float8", "rowwise"),
    "weight gradients in bf16": LowPrecision("float8", "rowwise_with_gw_hp", emulate=True),
    "mxfp8": LowPrecision("mx", "mxfp8_emulated", emulate=True),
}


def trained(case: Case, plan: LowPrecision | None, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, gradients of the first step, whole) of a run with `plan`."""
    meshes = Meshes(case.topology, "cpu", has_experts=case.args.n_experts > 0)
    model = build_parallel_model(
        case.args,
        meshes,
        DataParallel(case.stage, param_dtype=case.dtype),
        ActivationCheckpoint(mode=case.recompute),  # type: ignore[arg-type]
        Compile(enable=case.compile, backend="aot_eager"),
        torch.float32,
        seed=5,
        device=CPU,
        pipeline=pipeline_plan(case),
        low_precision=plan,
    )
    runs = build_pipeline(case, meshes, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    scale_after_updates(model, optimizer, plan)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        if not losses:
            found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            gradients.update({name: _whole(grad) for name, grad in found.items()})

    optimizer.register_step_pre_hook(keep)
    for _ in range(steps):
        batches = micro_batches(case, 0, meshes.dp_rank)  # the same rows again: the loss falls
        losses.append(train_step(model, optimizer, batches, meshes, case.stage, 1.0, CPU, runs).loss)
    return losses, gradients


@cache
def alone(plan: LowPrecision | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Twenty steps on one process."""
    (found,) = run_ranks(trained, 1, ONE, plan, 20)
    return found


def distances(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """By parameter: size of the difference over size of the gradient."""
    return {
        name: float((grad - expected[name]).norm() / expected[name].norm()) for name, grad in found.items()
    }


def _whole(grad: Any) -> torch.Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone()


@pytest.mark.parametrize("name", PLANS)
def test_twenty_steps_stay_close_to_bf16(name: str) -> None:
    """Operands have 3 bits behind the point, so a product of random ones is off by about 2^-4 / sqrt(3) of its size."""
    expected, exact = alone(None)
    losses, gradients = alone(PLANS[name])
    assert losses != expected, "nothing was converted"
    assert expected[-1] < 0.8 * expected[0]
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    assert worst < 0.02, f"loss {worst:.4f}"
    errors = distances(gradients, exact)
    assert 0.01 < max(errors.values()) < 0.12, errors


LAYOUTS: dict[str, tuple[Case, LowPrecision]] = {
    "ZeRO-3": (replace(ONE, topology=Topology(dp_shard=2)), TENSORWISE),
    "ZeRO-2, accumulation": (replace(ONE, topology=Topology(dp_shard=2), stage=2, accumulation=2), ROWWISE),
    "gathered": (replace(ONE, topology=Topology(dp_shard=2)), replace(TENSORWISE, gather=True)),
    "gathered, one reduction of scales": (
        replace(ONE, topology=Topology(dp_shard=2), stage=2),
        replace(TENSORWISE, gather=True, precompute=True),
    ),
    "recompute": (replace(ONE, topology=Topology(dp_shard=2), recompute="selective"), ROWWISE),
    "compile": (replace(ONE, topology=Topology(dp_shard=2), compile=True, recompute="full"), TENSORWISE),
    "context": (replace(ONE, topology=Topology(cp=2)), ROWWISE),
    "pipeline": (replace(ONE, topology=Topology(pp=2), microbatch_size=2), ROWWISE),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_with_one_process(name: str) -> None:
    """Tensorwise scales are of a rank's own tokens, so ranks differ by roundings, as they do in bf16."""
    case, plan = LAYOUTS[name]
    expected, exact = alone(replace(plan, gather=False, precompute=False))
    for losses, gradients in run_ranks(trained, case.topology.world_size, case, plan, 4, timeout=100):
        assert losses == pytest.approx(expected[:4], rel=5e-3)
        assert max(distances(gradients, exact).values()) < 0.12


def test_converted_are_the_linear_layers_of_the_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="titan5d")
    with torch.device("meta"):
        model = Decoder(replace(TINY, n_layers=3, ffn_dim=120))  # no multiple of 16
    names = list(model.state_dict())
    parts = [f"attention.{part}" for part in ("wq", "wk", "wv")]
    found = apply_low_precision(model, replace(ROWWISE, skip=("layers.1.", "wo")))
    assert found == [f"layers.{layer}.{part}" for layer in (0, 2) for part in parts]
    assert list(model.state_dict()) == names, "an exported model has the names it always had"
    inside = "{" + ", ".join(parts) + "}"
    first, second = caplog.messages
    assert first == (f"float8 (rowwise, emulated): 6 linear layers: layers.0.{inside}; layers.2.{inside}")
    assert "no multiples of 16, so not converted: layers.0.{feed_forward.w1" in second


def test_names_are_compressed() -> None:
    names = [f"layers.{layer}.{part}" for layer in (0, 1, 2, 4) for part in ("a.b", "c")]
    assert compressed([*names, "layers.5.c"]) == "layers.0-2.{a.b, c}; layers.4.{a.b, c}; layers.5.{c}"


def config(**changes: Any) -> Config:
    made = Config()
    made.model.converters = changes.pop("converters", ["quantize.linear.float8"])
    for path, value in changes.items():
        *sections, key = path.split("__")
        section: Any = made
        for part in sections:
            section = getattr(section, part)
        setattr(section, key, value)
    return made


FLOAT8 = "quantize__linear__float8__"
REFUSED: dict[str, tuple[Callable[[], list[str]], str]] = {
    "unknown": (
        lambda: precision_problems(config(converters=["int3"])),
        'there are "quantize.linear.float8" and',
    ),
    "both": (
        lambda: precision_problems(config(converters=["quantize.linear.float8", "quantize.linear.mx"])),
        "keep one",
    ),
    "scales alone": (
        lambda: precision_problems(config(**{f"{FLOAT8}precompute_float8_dynamic_scale_for_fsdp": True})),
        "set both or none",
    ),
    "rows gathered": (
        lambda: precision_problems(
            config(**{f"{FLOAT8}enable_fsdp_float8_all_gather": True, f"{FLOAT8}recipe_name": "rowwise"})
        ),
        "use 'tensorwise', or gather in bf16",
    ),
    "mx recipe": (
        lambda: precision_problems(
            config(converters=["quantize.linear.mx"], quantize__linear__mx__recipe_name="mxfp9")
        ),
        "'mxfp8_cublas' and 'mxfp8_emulated'",
    ),
    "state of SGD": (
        lambda: precision_problems(
            config(converters=[], optimizer__name="SGD", optimizer__state_dtype="int8")
        ),
        "is for AdamW and Adam",
    ),
    "tensor ranks": (
        lambda: layout_precision_problems(config(), Topology(tp=2), 0, False),
        "tensor_parallel_degree = 2: tensor ranks multiply slices",
    ),
    "split backward": (
        lambda: layout_precision_problems(config(), Topology(pp=2), 0, True),
        "gradients of weights apart from backward",
    ),
    "nothing gathered": (
        lambda: layout_precision_problems(
            config(**{f"{FLOAT8}enable_fsdp_float8_all_gather": True}), Topology(), 0, False
        ),
        "but nothing is gathered",
    ),
    "tokens": (
        lambda: layout_precision_problems(
            config(training__local_batch_size=1, training__seq_len=72), Topology(), 0, False
        ),
        "= 72, which must be a multiple of 16",
    ),
    "old device": (lambda: feature_problems(config(), "cuda", (8, 0)), "this one has 8.0"),
    "no Blackwell": (
        lambda: feature_problems(config(converters=["quantize.linear.mx"]), "cuda", (9, 0)),
        "capability 10.0 on (Blackwell), and this one has 9.0",
    ),
    "mx on a CPU": (
        lambda: feature_problems(config(converters=["quantize.linear.mx"]), "cpu"),
        "this run is on cpu",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(name: str) -> None:
    problems, words = REFUSED[name]
    (problem,) = problems()
    assert words in problem


def test_what_works_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    good = config()
    assert precision_problems(good) == layout_precision_problems(good, Topology(dp_shard=2), 3, False) == []
    assert feature_problems(good, "cuda", (8, 9)) == feature_problems(good, "cpu") == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install -c constraints.txt -e .[ao]" in precision_problems(good)[0]


def test_what_is_saved_is_an_ordinary_model(tmp_path: Path) -> None:
    """A run that gathers in float8 saves masters: a bf16 run continues from them, and float8 from that one's."""
    write_rows(tmp_path / "rows.jsonl")
    flags: dict[str, Any] = {
        "optimizer__name": "AdamW",
        "training__mixed_precision_param": "bfloat16",
        "training__local_batch_size": 4,
        "parallelism__zero_stage": 3,
        "checkpoint__enable": "true",
        "checkpoint__interval": 2,
        "checkpoint__initial_load_model_only": "false",
    }
    narrow = flags | {
        "model__converters": '["float8"]',
        "quantize__linear__float8__emulate": "true",
        "quantize__linear__float8__enable_fsdp_float8_all_gather": "true",
        "quantize__linear__float8__precompute_float8_dynamic_scale_for_fsdp": "true",
    }
    statuses, whole = run(tmp_path, "float8", 2, **narrow)
    assert statuses == [0, 0]
    saved = tmp_path / "float8" / "checkpoint" / "step-2"
    for name, kind in (("again", narrow), ("bf16", flags)):
        statuses, continued = run(tmp_path, name, 2, **kind, checkpoint__initial_load_path=saved)
        assert statuses == [0, 0]
        # scales are made anew at the start, by the same rule, so the same run goes on bit by bit
        tolerance = 0.0 if kind is narrow else 5e-3
        assert [p["loss"] for p in continued] == pytest.approx([p["loss"] for p in whole[2:]], rel=tolerance)
