"""Small layouts, run for real on CPU ranks and dry; and what both are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # a model on the meta device imports it: once here instead of on each forked rank
import torch.distributed as dist

from titan5d.config.check import Layout, check
from titan5d.config.load import load_config
from titan5d.config.schema import Config
from titan5d.dryrun.kinds import kind_of
from titan5d.dryrun.trace import Assumed, RankTrace, assumed_batches, trace_rank, without_collections
from titan5d.metrics.inside_operators import InsideOperators
from titan5d.metrics.ledger import CommunicationLedger, Entry
from titan5d.metrics.memory_ledger import MemoryLedger, MemoryUse
from titan5d.models.args import ModelArgs
from titan5d.models.families import model_args
from titan5d.parallel.mesh import Meshes
from titan5d.train.build import DTYPES, build_model, build_pipeline
from titan5d.train.optimizer import build_optimizer
from titan5d.train.step import train_step

CPU = torch.device("cpu")
DENSE = [
    *("--config", "quickstart", "--model.n_layers", "2"),
    *("--training.seq_len", "128", "--validation.enable", "false"),
]
EXPERTS = [
    *("--config", "moe_debug", "--model.n_layers", "2"),
    *("--training.seq_len", "128", "--debug.moe_force_load_balance", "true"),
]
"""Balanced for sure, so that the loads a dry run assumes are those of the run."""


@dataclass(frozen=True)
class Small:
    """A run of `world` ranks; flags as on the command line, without the dashes: "section.key value"."""

    world: int
    base: tuple[str, ...]
    flags: tuple[str, ...] = ()
    documents: int = 1

    def prepared(self) -> tuple[Config, ModelArgs, Layout]:
        words = [word for flag in self.flags for word in f"--{flag}".split()]
        config = load_config([*self.base, *words])
        args = model_args(config.model, config.moe, config.debug.moe_force_load_balance)
        return config, args, check(config, args, self.world)


def dense(world: int, *flags: str, documents: int = 1) -> Small:
    return Small(world, tuple(DENSE), flags, documents)


def experts(world: int, *flags: str) -> Small:
    return Small(world, tuple(EXPERTS), flags)


PAR = "parallelism"
LAYOUTS = {
    "one rank": dense(1, "training.global_batch_size 2"),
    **{
        f"ZeRO-{stage}, accumulation": dense(2, f"{PAR}.zero_stage {stage}", "training.global_batch_size 16")
        for stage in range(4)
    },
    "ZeRO-3, bf16, full recompute": dense(
        2,
        f"{PAR}.zero_stage 3",
        "training.global_batch_size 4",
        "training.mixed_precision_param bfloat16",
        "activation_checkpoint.mode full",
    ),
    "HSDP, selective recompute": dense(
        4,
        f"{PAR}.data_parallel_replicate_degree 2",
        f"{PAR}.zero_stage 2",
        "training.global_batch_size 8",
        "activation_checkpoint.mode selective",
    ),
    "TP": dense(2, f"{PAR}.tensor_parallel_degree 2", "training.global_batch_size 2"),
    "TP x FSDP, no sequence parallelism": dense(
        4,
        f"{PAR}.tensor_parallel_degree 2",
        f"{PAR}.sequence_parallel false",
        f"{PAR}.zero_stage 3",
        "training.global_batch_size 4",
    ),
    "CP ring, documents": dense(
        2,
        f"{PAR}.context_parallel_degree 2",
        f"{PAR}.zero_stage 3",
        "training.global_batch_size 2",
        documents=3,
    ),
    "CP all-gather": dense(
        2,
        f"{PAR}.context_parallel_degree 2",
        f"{PAR}.context_parallel_method allgather",
        f"{PAR}.zero_stage 1",
        "training.global_batch_size 2",
    ),
    "PP 1F1B": dense(2, f"{PAR}.pipeline_parallel_degree 2", "training.global_batch_size 4"),
    "PP zero bubble": dense(
        2,
        f"{PAR}.pipeline_parallel_degree 2",
        f"{PAR}.pipeline_parallel_schedule ZBVZeroBubble",
        "model.n_layers 4",
        "training.global_batch_size 4",
    ),
    "PP x TP": dense(
        4,
        f"{PAR}.pipeline_parallel_degree 2",
        f"{PAR}.tensor_parallel_degree 2",
        "training.global_batch_size 4",
    ),
    "experts": experts(
        2, f"{PAR}.expert_parallel_degree 2", f"{PAR}.zero_stage 3", "training.global_batch_size 8"
    ),
    "experts, ZeRO-1, full recompute": experts(
        4,
        f"{PAR}.expert_parallel_degree 2",
        f"{PAR}.zero_stage 1",
        "training.global_batch_size 16",
        "activation_checkpoint.mode full",
    ),
    "experts x slices, selective recompute": experts(
        4,
        f"{PAR}.expert_parallel_degree 2",
        f"{PAR}.expert_tensor_parallel_degree 2",
        "training.global_batch_size 8",
        "activation_checkpoint.mode selective",
    ),
    "experts x TP": experts(
        2,
        f"{PAR}.expert_parallel_degree 2",
        f"{PAR}.tensor_parallel_degree 2",
        "training.global_batch_size 4",
    ),
    "experts x PP": experts(
        4,
        f"{PAR}.pipeline_parallel_degree 2",
        f"{PAR}.expert_parallel_degree 2",
        "training.global_batch_size 8",
    ),
}


def dry(case: Small, rank: int) -> RankTrace:
    """The dry run of one rank."""
    config, args, layout = case.prepared()
    return trace_rank(config, args, layout, kind_of(layout, rank), Assumed(documents=case.documents))


class WithoutGloo(MemoryLedger):
    """Leaves out what gloo makes for itself: it reduce-scatters by all-reducing a copy, of which it then takes pieces,
    and these pieces are all that a ledger sees of it."""

    def _purposes(self, name: str, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[str, Any]]:
        if name.startswith("aten.split.") and self._purpose(args[0]) is None:
            return
        yield from super()._purposes(name, args, kwargs, out)


def real(case: Small) -> tuple[MemoryUse, MemoryUse, list[Entry]]:
    """(peak, highest, traffic) of the second step of this rank of a real world."""
    config, args, layout = case.prepared()
    meshes = Meshes(layout.topology, "cpu", has_experts=args.n_experts > 0)
    model = build_model(config, args, layout, meshes, CPU)
    pipeline = build_pipeline(config, layout, meshes, model, CPU)
    optimizer = build_optimizer(
        model.named_parameters(), config.optimizer, DTYPES[config.training.mixed_precision_param]
    )
    batches = assumed_batches(config, layout.accumulation, case.documents)

    def step() -> None:
        max_norm, stage = config.training.max_norm, layout.zero_stage
        train_step(model, optimizer, batches, meshes, stage, max_norm, CPU, pipeline)

    step()
    dist.barrier()
    memory, traffic = WithoutGloo(model, optimizer), CommunicationLedger(meshes.groups())
    with without_collections(), memory, traffic, InsideOperators():
        step()
    return memory.peak, memory.highest, traffic.entries
