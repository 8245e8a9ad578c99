"""The static part of the plan's memory (weights, gradients, moments) against the bytes that ranks really hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.models.test_moe import TINY_M
from tests.parity import Case, build_pipeline, micro_batches, pipeline_plan
from tests.plan.planning import case_with
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.hardware import find_device
from titan5d.launch.local_ranks import run_ranks
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.plan.assumptions import assumptions_of
from titan5d.plan.parts import rank_parts
from titan5d.plan.rank_memory import fullest, pipeline_memory, rank_state
from titan5d.topology import Topology
from titan5d.train.step import train_step

CPU = torch.device("cpu")
SIZES = {
    "dim": 64,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 4,
    "head_dim": 8,
    "ffn_dim": 128,
    "vocab_size": 256,
}
EXPERTS = {"name": "mixtral", "n_experts": 8, "top_k": 2, "moe_ffn_dim": 64, "n_shared_experts": 1}


def static_bytes(case: Case) -> tuple[int, int, int]:
    """(weights, gradients, moments) on this rank: its tensors, added up."""
    meshes = Meshes(case.topology, "cpu", has_experts=case.args.n_experts > 0)
    data = DataParallel(case.stage, param_dtype=case.dtype)
    off, pipeline = (ActivationCheckpoint(), Compile()), pipeline_plan(case)
    model = build_parallel_model(
        case.args, meshes, data, *off, torch.float32, seed=5, device=CPU, pipeline=pipeline
    )
    optimizer = torch.optim.AdamW(model.parameters())
    gradients: list[int] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(sum(_bytes(p.grad) for p in model.parameters() if p.grad is not None))
    )
    batches, run = micro_batches(case, 0, meshes.dp_rank), build_pipeline(case, meshes, model)
    train_step(model, optimizer, batches, meshes, case.stage, 1.0, CPU, run)
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return sum(map(_bytes, model.parameters())), gradients[0], sum(map(_bytes, moments))


def _bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def planned_bytes(case: Case, rank: int) -> tuple[float, float, float]:
    state = rank_state(planned(case), rank_parts(planned(case), rank), rank)
    return state.weights, state.gradients, state.optimizer


def planned(case: Case) -> Any:
    topology = case.topology
    sizes = SIZES | (EXPERTS if case.args.n_experts else {})
    keys: dict[str, Any] = {f"model.{name}": value for name, value in sizes.items()}
    keys |= {
        "parallelism.tensor_parallel_degree": topology.tp,
        "parallelism.expert_parallel_degree": topology.ep,
        "parallelism.expert_tensor_parallel_degree": topology.etp,
        "parallelism.pipeline_parallel_degree": topology.pp,
        "parallelism.zero_stage": case.stage,
        "training.seq_len": case.seq_len,
        "training.local_batch_size": len(case.valid) // topology.dp,
        "training.mixed_precision_param": str(case.dtype).removeprefix("torch."),
    }
    return case_with(topology.world_size, keys)


WHOLE = 180_800 * 16
CASES: dict[str, tuple[Case, list[float]]] = {
    "1 process": (Case(stage=0), [WHOLE]),
    "1 process, bf16 over fp32": (Case(stage=0, dtype=torch.bfloat16), [WHOLE]),
    "FSDP4": (Case(Topology(dp_shard=4)), [WHOLE / 4] * 4),
    # norms, 9 x 64 weights, are whole on both
    "TP2": (Case(Topology(tp=2), stage=0), [(WHOLE + 16 * 9 * 64) / 2] * 2),
    # embedding and head are of the same size, the last stage has the last norm, too
    "PP2": (Case(Topology(pp=2), stage=0), [(WHOLE - 16 * 64) / 2, (WHOLE + 16 * 64) / 2]),
    # of 526,912 parameters routers (4 x 8 x 64) are whole on all
    "experts, EP4": (
        Case(Topology(dp_shard=4, ep=4), args=TINY_M),
        [16 * ((526_912 - 2_048) / 4 + 2_048)] * 4,
    ),
    "experts, EP2 x 2 slices": (
        Case(Topology(dp_shard=4, ep=2, etp=2), args=TINY_M),
        [16 * ((526_912 - 2_048) / 4 + 2_048)] * 4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_static_bytes_are_exact(name: str) -> None:
    """Case 092."""
    case, expected = CASES[name]
    ranks = run_ranks(static_bytes, case.topology.world_size, case, timeout=60)
    assert [sum(found) for found in ranks] == expected
    for rank, found in enumerate(ranks):
        assert found == planned_bytes(case, rank if case.topology.pp > 1 else 0)


def test_stages_add_up_and_the_fullest_rank_is_named() -> None:
    """Case 092."""
    case = planned(Case(Topology(pp=2), stage=0))
    assert sum(sum(planned_bytes(Case(Topology(pp=2), stage=0), rank)) for rank in range(2)) == WHOLE
    device = find_device("h100-80g")
    assert device is not None
    ranks = pipeline_memory(case, assumptions_of(device))
    assert [one.kind for one in ranks] == ["first (embedding)", "last (head)"]
    assert ranks[0].in_flight > ranks[1].in_flight
    assert fullest(ranks).kind == "first (embedding)"  # it holds the activations of more micro-batches
