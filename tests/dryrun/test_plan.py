"""The planner's closed forms against a dry run, purpose by purpose, at the fullest operator of the step.

docs/planning.md ("Against dry runs") lists what is not here: layouts that agree in total only, and by how much.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dryrun.layouts import PAR, Small
from titan5d.dryrun.cli import traceable
from titan5d.dryrun.kinds import kind_of
from titan5d.dryrun.trace import Assumed, trace_rank
from titan5d.hardware import find_device
from titan5d.metrics.memory_ledger import MemoryUse
from titan5d.plan.assumptions import Assumptions, assumptions_of
from titan5d.plan.case import case_of
from titan5d.plan.rank_memory import RankMemory, pipeline_memory

WITHIN = 0.05
DENSE = ("--config", "llama3_8b", "--model.n_layers", "2", "--training.seq_len", "4096")
EXPERTS = ("--config", "mixtral_8x7b", "--model.n_layers", "3")
LATENT = (
    "--config",
    "deepseek_v3_671b",
    "--model.n_layers",
    "4",
    "--parallelism.pipeline_parallel_degree",
    "1",
)
ACTIVATIONS = (
    "activations",
    "recomputed block",
    "block gradients",
    "context buffers",
    "expert buffers",
    "pipeline buffers",
)


def dense(world: int, batch: int, recompute: str, *flags: str) -> Small:
    return Small(world, DENSE, (*_common(batch, recompute), *flags))


def experts(world: int, batch: int, recompute: str, *flags: str) -> Small:
    return Small(world, EXPERTS, (*_common(batch, recompute), *flags))


def latent(world: int, batch: int, recompute: str, *flags: str) -> Small:
    return Small(world, LATENT, (*_common(batch, recompute), *flags))


def _common(batch: int, recompute: str) -> tuple[str, str]:
    return f"training.global_batch_size {batch}", f"activation_checkpoint.mode {recompute}"


SHARD, TENSOR, CONTEXT, PIPELINE, EXPERT = (
    f"{PAR}.{axis}_degree"
    for axis in (
        "data_parallel_shard",
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
        "expert_parallel",
    )
)
SCHEDULE = f"{PAR}.pipeline_parallel_schedule"
LONG = (f"{SHARD} 8", f"{CONTEXT} 4", "training.seq_len 32768")
CUT = ("model.n_layers 8", f"{PIPELINE} 4")
HALVES = ("model.n_layers 4", f"{PIPELINE} 2")
WHOLE, FP32 = f"{PAR}.zero_stage 0", "training.mixed_precision_param float32"
LAYOUTS: dict[str, tuple[Small, int]] = {
    "ZeRO-1": (dense(8, 8, "none", f"{PAR}.zero_stage 1"), 0),
    "ZeRO-2, accumulation, selective": (dense(8, 16, "selective", f"{PAR}.zero_stage 2"), 0),
    "ZeRO-3, full": (dense(8, 8, "full"), 0),
    "ZeRO-3, fp32": (dense(8, 8, "none", "training.mixed_precision_param float32"), 0),
    "ZeRO-3, accumulation": (dense(8, 16, "none"), 0),
    "ZeRO-0, fp32": (dense(8, 8, "none", WHOLE, FP32), 0),
    "ZeRO-0": (dense(8, 8, "none", WHOLE), 0),
    "ZeRO-0, fp32, accumulation": (dense(4, 8, "none", f"{SHARD} 4", WHOLE, FP32), 0),
    "ZeRO-0, accumulation": (dense(4, 8, "none", f"{SHARD} 4", WHOLE), 0),
    "ZeRO-0, fp32, PP, first stage": (dense(8, 16, "none", *HALVES, f"{SHARD} 4", WHOLE, FP32), 0),
    "ZeRO-0, fp32, PP, last stage": (dense(8, 16, "none", *HALVES, f"{SHARD} 4", WHOLE, FP32), 4),
    "HSDP, full": (dense(32, 64, "full", f"{PAR}.data_parallel_replicate_degree 4"), 0),
    "FSDP x TP, selective": (dense(64, 16, "selective", f"{SHARD} 8", f"{TENSOR} 8"), 0),
    "CP ring, full": (dense(32, 8, "full", *LONG), 0),
    "CP all-gather": (dense(32, 8, "none", *LONG, f"{PAR}.context_parallel_method allgather"), 0),
    "PP, first stage": (dense(32, 64, "none", *CUT, f"{SHARD} 8", f"{PAR}.zero_stage 2"), 0),
    "PP x TP, last stage, full": (
        dense(32, 32, "full", *CUT, f"{SHARD} 4", f"{TENSOR} 2", f"{PAR}.zero_stage 1"),
        24,
    ),
    "ZBV, a pipe filled once, first and last stage": (
        dense(32, 32, "none", *CUT, f"{SHARD} 8", f"{PAR}.zero_stage 1", f"{SCHEDULE} ZBVZeroBubble"),
        0,
    ),
    "ZBV, middle stages": (
        dense(32, 64, "none", *CUT, f"{SHARD} 8", f"{PAR}.zero_stage 1", f"{SCHEDULE} ZBVZeroBubble"),
        8,
    ),
    "ZBV x TP, middle stages": (
        dense(
            16,
            8,
            "none",
            *CUT,
            f"{SHARD} 1",
            f"{TENSOR} 4",
            f"{PAR}.zero_stage 1",
            f"{SCHEDULE} ZBVZeroBubble",
        ),
        4,
    ),
    "DualPipeV, middle stages": (
        dense(32, 128, "none", *CUT, f"{SHARD} 8", f"{PAR}.zero_stage 1", f"{SCHEDULE} DualPipeV"),
        8,
    ),
    "latent attention, small": (
        latent(8, 8, "none", "model.flavor 16B", f"{SHARD} 8", f"{EXPERT} 1"),
        0,
    ),
    "latent attention, EP, selective": (latent(32, 32, "selective", f"{SHARD} 32", f"{EXPERT} 16"), 0),
    "latent attention, EP x TP, ZeRO-2": (
        latent(64, 64, "none", f"{SHARD} 16", f"{TENSOR} 4", f"{EXPERT} 16", f"{PAR}.zero_stage 2"),
        0,
    ),
    "EP, ZeRO-2, accumulation": (
        experts(16, 32, "none", f"{SHARD} 16", f"{EXPERT} 8", f"{PAR}.zero_stage 2"),
        0,
    ),
    "EP x TP, selective": (experts(32, 32, "selective", f"{SHARD} 8", f"{TENSOR} 4", f"{EXPERT} 8"), 0),
    "EP, each expert on one rank, fp32": (experts(4, 4, "none", f"{SHARD} 4", f"{EXPERT} 4", FP32), 0),
    "EP, each expert on one rank, fp32, full": (
        experts(4, 4, "full", f"{SHARD} 4", f"{EXPERT} 4", FP32),
        0,
    ),
    "experts, full": (experts(8, 8, "full", f"{SHARD} 8", f"{PAR}.expert_parallel_degree 1"), 0),
    "EP, accumulation, full": (experts(64, 128, "full"), 0),
    "EP x slices, full": (experts(64, 128, "full", f"{PAR}.expert_tensor_parallel_degree 2"), 0),
    "EP x slices, selective": (experts(64, 128, "selective", f"{PAR}.expert_tensor_parallel_degree 2"), 0),
}
"""(layout, rank)."""


def exact() -> Assumptions:
    """Assumptions without what a dry run does not see."""
    device = find_device("h100-80g")
    assert device is not None
    return replace(assumptions_of(device), allocator=0.0, context=0.0, load_imbalance=1.0)


def by_purpose(planned: RankMemory) -> dict[str, float]:
    lines = planned.lines
    return {
        "weights": lines["weights"],
        "optimizer": lines["moments"],
        "gradients": lines["gradients"] + lines["gather and reduce buffers"],
        "gathered": lines["gathered weights"],
        "activations": sum(lines[name] for name in ACTIVATIONS),
        "logits": lines["logits and loss"],
    }


def traced_by_purpose(use: MemoryUse) -> dict[str, float]:
    return {
        "weights": use.weights,
        "optimizer": use.optimizer,
        "gradients": use.gradients + use.buffers,
        "gathered": use.gathered,
        "activations": use.activations + use.other,
        "logits": use.logits,
    }


TOTALS: dict[str, tuple[Small, int]] = {
    "TP alone": (dense(8, 1, "none", f"{SHARD} 1", f"{TENSOR} 8"), 0),
    "ZeRO-0, full": (dense(8, 8, "full", WHOLE), 0),
    "EP, two experts on one rank": (experts(4, 4, "none", f"{SHARD} 4", f"{EXPERT} 4"), 0),
    "EP, each expert on one rank": (experts(8, 8, "none", f"{SHARD} 8", f"{EXPERT} 8"), 0),
    "EP, each expert on one rank, selective": (experts(8, 8, "selective", f"{SHARD} 8", f"{EXPERT} 8"), 0),
}
"""Where the ledger cannot tell copies that are gathered or reduced from activations, as nothing is shared or sent."""


def both(small: Small, rank: int) -> tuple[RankMemory, MemoryUse]:
    """(planned, traced at the peak)."""
    config, args, layout = small.prepared()
    config = traceable(config)
    place = layout.topology.coordinates(rank)["pp"]
    planned = pipeline_memory(case_of(config, args, layout), exact())[place]
    return planned, trace_rank(config, args, layout, kind_of(layout, rank), Assumed()).peak


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_purpose_is_its_closed_form(name: str) -> None:
    planned, traced = both(*LAYOUTS[name])
    assert planned.total == pytest.approx(traced.total, rel=0.02)
    least = 0.01 * traced.total  # what is less decides nothing
    expected = traced_by_purpose(traced)
    for purpose, found in by_purpose(planned).items():
        assert found == pytest.approx(expected[purpose], rel=WITHIN, abs=least), purpose


@pytest.mark.parametrize("name", TOTALS)
def test_the_total_is_its_closed_form(name: str) -> None:
    planned, traced = both(*TOTALS[name])
    assert planned.total == pytest.approx(traced.total, rel=0.02)
