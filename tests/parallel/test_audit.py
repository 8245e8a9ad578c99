"""The gradient audit: silent on every healthy cut, and naming what was broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.test_expert import ARGS as MOE
from tests.parity import TINY, TINY_TIED, Case, build_pipeline, micro_batches, pipeline_plan
from tests.train.test_runs import run, write_rows
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.parallel import gradients, pipeline, pipeline_schedule, tensor, tensor_products
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.audit import GradientAudit, GradientAuditFailed
from titan5d.parallel.data import DataParallel, fsdp_modules
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology
from titan5d.train import step
from titan5d.train.step import train_step

CPU = torch.device("cpu")
SMALL = Case(args=replace(TINY, n_layers=2), accumulation=2, documents=True)
TIED = replace(SMALL, args=replace(TINY_TIED, n_layers=2))

HEALTHY = {
    "one": SMALL,
    "ZeRO-0": replace(SMALL, topology=Topology(dp_shard=2), stage=0),
    "ZeRO-1": replace(SMALL, topology=Topology(dp_shard=2), stage=1),
    "ZeRO-3, recompute, compile": replace(
        SMALL, topology=Topology(dp_shard=2), recompute="full", compile=True
    ),
    "HSDP": replace(SMALL, topology=Topology(dp_replicate=2, dp_shard=2)),
    "tp": replace(SMALL, topology=Topology(tp=2)),
    "tp, few key/value heads": replace(
        SMALL, args=replace(SMALL.args, n_kv_heads=1, qk_norm=True), topology=Topology(tp=2)
    ),
    "dp x tp": replace(TIED, topology=Topology(dp_shard=2, tp=2), stage=2),
    "bf16": replace(SMALL, topology=Topology(dp_shard=2, tp=2), dtype=torch.bfloat16),
    "cp": replace(SMALL, topology=Topology(cp=2)),
    "pp, tied": replace(TIED, topology=Topology(pp=2, dp_shard=2), accumulation=1),
    "pp, split backward": replace(SMALL, topology=Topology(pp=2), accumulation=1, schedule="ZBVZeroBubble"),
    "ep": replace(SMALL, args=MOE, topology=Topology(dp_shard=2, tp=2, ep=2)),
}


def audited(case: Case, break_it: Callable[[Any], None] | None = None) -> str:
    """What the audit says after a step on which `break_it` was let loose; nothing if all is well."""
    meshes = Meshes(case.topology, "cpu", has_experts=case.args.n_experts > 0)
    recompute = ActivationCheckpoint(mode=case.recompute)  # type: ignore[arg-type]
    model = build_parallel_model(
        case.args,
        meshes,
        DataParallel(case.stage, param_dtype=case.dtype),
        recompute,
        Compile(enable=case.compile, backend="aot_eager"),
        torch.float32,
        seed=5,
        device=CPU,
        pipeline=pipeline_plan(case),
    )
    runs = build_pipeline(case, meshes, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if break_it is not None:
        break_it(model)
    audit = GradientAudit(model, meshes)
    try:
        for number in range(2):
            batches = micro_batches(case, number, meshes.dp_rank)
            train_step(model, optimizer, batches, meshes, case.stage, 1.0, CPU, runs, audit=audit)
    except GradientAuditFailed as failed:
        return str(failed)
    return ""


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_cut_passes(name: str) -> None:
    case = HEALTHY[name]
    assert run_ranks(audited, case.topology.world_size, case, timeout=100) == [""] * case.topology.world_size


def no_partial_sums(model: Any) -> None:
    step.reduce_partial_gradients = lambda parameters: None  # type: ignore[assignment]


def norms_taken_for_whole(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, tensor.ReplicatedNorm):
            module.partial = False


def no_replica_sum(model: Any) -> None:
    for module in fsdp_modules(model):
        module.set_requires_all_reduce = lambda *args, **kwargs: None  # type: ignore[method-assign]
        type(module).set_requires_all_reduce(module, False)


def mean_instead_of_sum(model: Any) -> None:
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(2.0)


def experts_divided(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("experts") and module in set(fsdp_modules(model)):
            module.set_gradient_divide_factor(2.0)


def no_tied_sum(model: Any) -> None:
    pipeline_schedule.sum_tied_gradients = lambda *args: None  # type: ignore[assignment]


BROKEN: dict[str, tuple[Case, Callable[[Any], None], list[str]]] = {
    "partial": (
        HEALTHY["tp"],
        no_partial_sums,
        ["layers.0.attention_norm.weight on axis tp (ranks 0, 1): still a partial sum", "  norm.weight"],
    ),
    "whole": (
        HEALTHY["tp"],
        norms_taken_for_whole,
        [
            "layers.1.ffn_norm.weight on axis tp (ranks 0, 1): declared replicated, but differs by",
            "on rank 0, ",
            "on rank 1)",
        ],
    ),
    "replicas": (
        HEALTHY["HSDP"],
        no_replica_sum,
        ["layers.0.attention.wq.weight on rank 0: no gradient"],  # FSDP2 keeps it back
    ),
    "mean": (
        HEALTHY["ZeRO-1"],
        mean_instead_of_sum,
        ["tok_embeddings.weight over axis shard, rank 1: not the sum of what the ranks made, off by 5.0e-01"],
    ),
    "experts": (
        replace(SMALL, args=MOE, topology=Topology(dp_shard=4, ep=2)),
        experts_divided,
        ["experts.w1 over axis efsdp, rank 3: not the sum of what the ranks made, off by 5.0e-01"],
    ),
    "tied": (
        HEALTHY["pp, tied"],
        no_tied_sum,
        [
            "tied matrix over axis pp: the gradients of tok_embeddings.weight on rank 0 and output.weight on rank 2"
        ],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(name: str) -> None:
    case, break_it, expected = BROKEN[name]
    found = run_ranks(audited, case.topology.world_size, case, break_it, timeout=100)
    assert len(set(found)) == 1, "all ranks say the same"
    for words in expected:
        assert words in found[0]
    if name == "experts":
        assert "attention" not in found[0]


def test_a_run_that_fails_its_audit_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    flags = {"parallelism__tensor_parallel_degree": 2, "debug__audit_gradients": "true"}
    statuses, points = run(tmp_path, "healthy", 2, **flags)
    assert statuses == [0, 0] and len(points) == 4
    monkeypatch.setattr(step, "reduce_partial_gradients", lambda parameters: None)
    statuses, points = run(tmp_path, "broken", 2, **flags)
    assert statuses == [1, 1] and points == []


def test_what_is_broken_on_purpose_is_there() -> None:
    """The names that the tests above replace."""
    assert step.reduce_partial_gradients is gradients.reduce_partial_gradients
    assert pipeline_schedule.sum_tied_gradients is pipeline.sum_tied_gradients
    assert tensor.local_replica is tensor_products.local_replica
