"""Runs a small case with the trainer itself, on the ranks of the current process group, and collects what it did.

Model, optimizer, schedule, loader and log are built by `Trainer` from the same keys as in training; only the rows are
made up (rows.py). The case is the file's; a layout changes its second half, how it is executed:

    reference   one process, all rows of a step in one micro-batch, no recompute, no compile
    layout      its degrees, everything else of the second half as in the file
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch
import torch._dynamo  # a model on the meta device imports it: once here instead of on each forked rank
import torch.distributed as dist
from torch._dynamo.utils import counters

from titan5d.config.check import Layout, check
from titan5d.config.load import ConfigError
from titan5d.config.schema import Config
from titan5d.config.schema_execution import ActivationCheckpoint, Compile, Parallelism
from titan5d.data.loader import DataLoader
from titan5d.data.validation import ValidationBatches
from titan5d.launch.exit_status import DONE
from titan5d.models.args import ModelArgs
from titan5d.train.trainer import Trainer
from titan5d.verify.compare import Check, Outcome, compare_metrics, compare_tensors
from titan5d.verify.gather import all_stages, whole
from titan5d.verify.layouts import Cuts
from titan5d.verify.rows import UnevenRows
from titan5d.verify.shrink import STEPS, Small, arguments

HELD_OUT = 5
"""Held-out rows: no multiple of any batch, so the last one is filled up."""


@dataclass(frozen=True)
class Case:
    """A config with the degrees of one layout, checked."""

    config: Config
    args: ModelArgs
    layout: Layout


def case_of(small: Small, cuts: Cuts) -> Case:
    """The small case under one layout. Raises ConfigError where config/check.py refuses it, for the small sizes or for
    those of the file."""
    world = cuts.topology.world_size
    problems: list[str] = []
    for config in (small.sizes, small.config):
        found = _with_degrees(config, cuts)
        try:
            layout = check(found, arguments(found), world)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
        if problems:
            raise ConfigError(problems)
    return Case(found, arguments(found), layout)


def reference_case(small: Small) -> Case:
    """The same model and rows on one process, executed in the plainest way."""
    config = deepcopy(small.config)
    config.parallelism = Parallelism(data_parallel_shard_degree=1, zero_stage=0)
    config.activation_checkpoint, config.compile = ActivationCheckpoint(), Compile()
    config.training.enable_cpu_offload = False
    if config.moe.aux_loss_kind != "micro_batch":  # where it is not part of what is learned
        config.training.local_batch_size = config.training.global_batch_size
    args = arguments(config)
    return Case(config, args, check(config, args, 1))


def _with_degrees(config: Config, cuts: Cuts) -> Config:
    config, topology = deepcopy(config), cuts.topology
    par = config.parallelism
    par.data_parallel_replicate_degree, par.data_parallel_shard_degree = (
        topology.dp_replicate,
        topology.dp_shard,
    )
    par.tensor_parallel_degree, par.context_parallel_degree = topology.tp, topology.cp
    par.pipeline_parallel_degree, par.expert_parallel_degree = topology.pp, topology.ep
    par.expert_tensor_parallel_degree = topology.etp
    if topology.pp == 1 or topology.expert_ranks == 1:  # of several layouts: where there is nothing to overlap
        par.pipeline_parallel_expert_parallel_overlap = False
    if cuts.zero_stage is not None:
        par.zero_stage = cuts.zero_stage
        par.fsdp_reshard_after_forward = "default"
    return config


def run_case(case: Case, folder: Path) -> Outcome:
    """Trains and returns what happened; the tensors are whole on every rank."""
    config, outcome = deepcopy(case.config), Outcome()
    config.job.dump_folder = str(folder)
    torch._dynamo.reset()
    counters.clear()
    trainer = Trainer(config, case.args, case.layout, *_data(case), torch.device("cpu"))
    group, tied = trainer.meshes.group("pp"), case.args.tie_embeddings

    def before_update(*_: object) -> None:
        if config.compile.enable:
            outcome.graphs.append(counters["stats"]["unique_graphs"])
        if not outcome.gradients:
            gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
            outcome.gradients = all_stages(whole(gradients), group, tied)

    trainer.optimizer.register_step_pre_hook(before_update)
    if (status := trainer.run()) != DONE:
        raise RuntimeError(f"the run ended with exit status {status} (gradients that are not finite?)")
    outcome.graph_breaks = sum(counters["graph_break"].values())
    outcome.weights = all_stages(whole(dict(trainer.model.named_parameters())), group, tied)
    routers = trainer.model.routers()
    state = {f"layers.{name}.router.bias": router.bias for name, router in routers.items()}
    state |= {f"layers.{name}.router.load": router.load.float() for name, router in routers.items()}
    outcome.routers = all_stages(whole(state), group, tied=False)
    if dist.get_rank() == 0:
        outcome.metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return outcome


def run_reference_case(case: Case, folder: Path) -> Outcome:
    """Trains on the one rank of the reference."""
    with _quiet():
        return run_case(case, folder)


def run_and_compare(case: Case, folder: Path, expected: Outcome) -> list[Check]:
    """Trains and returns how far this rank is from the reference."""
    with _quiet():
        found = run_case(case, folder)
    checks = compare_tensors(found, expected, dist.get_rank())
    return checks if dist.get_rank() else [*checks, *compare_metrics(found.metrics, expected.metrics)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps log, warnings and the run's own lines out of the report; for a process that does nothing else."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with redirect_stdout(StringIO()):
        yield


def _data(case: Case) -> tuple[DataLoader, ValidationBatches | None]:
    """The made-up rows, read by the trainer's own loader as the keys say."""
    training, validation, layout = case.config.training, case.config.validation, case.layout
    topology, vocab, mask = layout.topology, case.args.vocab_size, training.document_mask
    dp_rank = topology.dp_rank(dist.get_rank())
    rows = UnevenRows(STEPS * layout.global_batch_size, training.seq_len, vocab, seed=11, document_mask=mask)
    loader = DataLoader(
        rows,
        global_batch_size=layout.global_batch_size,
        local_batch_size=training.local_batch_size,
        dp_rank=dp_rank,
        dp_size=topology.dp,
        seed=layout.seed,
        shuffle=training.shuffle,
        prefetch=training.dataloader.prefetch_factor or 2,
    )
    held_out = None
    if validation.enable:
        held_out = ValidationBatches(
            UnevenRows(HELD_OUT, validation.seq_len, vocab, seed=12, document_mask=mask),
            global_batch_size=validation.local_batch_size * topology.dp,
            local_batch_size=validation.local_batch_size,
            dp_rank=dp_rank,
            dp_size=topology.dp,
            steps=validation.steps,
        )
    return loader, held_out
