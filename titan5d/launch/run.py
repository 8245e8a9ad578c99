"""`titan5d train`: from a command line to a run on this rank, and to its exit status.

Everything that can be refused is refused before the process group exists, by each rank alone and by the same rules,
so that no rank waits for one that has left.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan5d.checkpoint.errors import CheckpointRefused, SaveFailed
from titan5d.config.check import (
    Layout,
    check,
    device_problems,
    leaves_zero_stage_open,
    pipeline_notes,
)
from titan5d.config.check_device import feature_problems
from titan5d.config.check_placement import layout_notes
from titan5d.config.check_precision import filter_problems
from titan5d.config.load import ConfigError, load_config, to_toml
from titan5d.config.schema import Config
from titan5d.data.dataset import Dataset
from titan5d.data.errors import DataError
from titan5d.data.loader import DataLoader
from titan5d.data.open import Split, check_dataset_against_model, open_dataset
from titan5d.data.tokenizer import check_against_model, load_tokenizer
from titan5d.data.validation import ValidationBatches
from titan5d.launch import exit_status, failure, link_speed
from titan5d.launch.allocator import keep_freed_memory
from titan5d.launch.parent_death import end_with_launcher
from titan5d.launch.preflight import PreflightRefused, agree
from titan5d.launch.watchdog import Watchdog
from titan5d.models.args import ModelArgs
from titan5d.models.families import FAMILIES, model_args
from titan5d.parallel.audit import GradientAuditFailed
from titan5d.plan.fits import least_zero_stage, memory_problems
from titan5d.train.trainer import Trainer

log = logging.getLogger("titan5d")


def train(argv: Sequence[str]) -> int:
    """Runs `titan5d train ARGS` on this rank and returns its exit status (0 done, 2 refused, 1 anything else)."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    end_with_launcher()
    failure.begin()
    _log_on_rank_0(rank)
    try:
        config, args, layout, notes = prepare(argv, world, local_world)
        for note in notes:
            log.info("note: %s", note)
        loader, held_out = open_data(config, args, layout, rank)
    except (ConfigError, DataError) as error:
        text = str(error) if isinstance(error, ConfigError) else f"refused: {error}"
        if _speaks():
            print(text, file=sys.stderr, flush=True)
        status = exit_status.record(exit_status.REFUSED)
        if status == exit_status.REFUSED and not _speaks() and exit_status.FOLDER in os.environ:
            print(f"rank {rank}: {text}", file=sys.stderr, flush=True)  # refused alone
        return status
    watchdog: Watchdog | None = None
    try:
        device = join(config, rank, world)
        agree(config)
        watchdog = Watchdog.of_run(config, rank, world, device.type)
        layout = settle_zero_stage(config, args, layout, device, local_world)
        trainer = Trainer(config, args, layout, loader, held_out, device)
        if watchdog is not None:
            patient, patience = trainer.checkpoints.agreement.group, config.comm.files_timeout_seconds
            watchdog.watch(trainer.meshes.groups(), trainer.progress, patient, patience)
        if rank == 0:  # only now is the folder known to be this run's
            save_config(config)
        if config.comm.preflight and world > 1:
            link_speed.measure(trainer.meshes, device, local_world)
        status = trainer.run()
    except (PreflightRefused, CheckpointRefused) as refused:  # on all ranks alike
        _say(str(refused), rank)
        status = exit_status.REFUSED
    except (SaveFailed, GradientAuditFailed) as failed:  # on all ranks alike
        _say(f"failed: {failed}", rank)
        status = exit_status.FAILED
    except Exception as error:
        log.exception("rank %d of %d on %s failed", rank, world, socket.gethostname())
        failure.note(error)
        if watchdog is not None:
            watchdog.failed(error)
        exit_status.record(exit_status.FAILED)
        raise
    leave()
    if watchdog is not None:
        watchdog.stop()
    return exit_status.record(status)


def prepare(
    argv: Sequence[str], world_size: int, local_world_size: int
) -> tuple[Config, ModelArgs, Layout, list[str]]:
    """Reads and checks a run's config for a world of ranks. Raises ConfigError with everything that cannot work."""
    notes: list[str] = []
    config = load_config(argv, notes)
    args = model_args(config.model, config.moe, config.debug.moe_force_load_balance)
    layout = check(config, args, world_size)
    device = device_type(config)
    problems = memory_problems(config, args, layout, device, local_world_size)
    problems += device_problems(config, layout.topology, device, local_world_size)
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    problems += feature_problems(config, device, capability)
    if config.model.converters:  # a large model has many names
        problems += filter_problems(config, FAMILIES[config.model.name].hf_name_map(args))
    if problems:
        raise ConfigError(problems)
    notes += layout_notes(layout.topology, local_world_size)
    notes += pipeline_notes(layout)
    return config, args, layout, notes


def open_data(
    config: Config, args: ModelArgs, layout: Layout, rank: int
) -> tuple[DataLoader, ValidationBatches | None]:
    """(training data, held-out data or None) of this rank.

    Text that is not tokenized yet is, by one rank of each machine. Raises DataError when the data cannot be read, does
    not fit the model, or does not fill a global batch.
    """
    training, validation, topology = config.training, config.validation, layout.topology
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    check_against_model(tokenizer, args.vocab_size)
    cache = Path(training.cache_folder).expanduser() if training.cache_folder else None

    def opened(name: str, path: str | None, seq_len: int, split: Split) -> Dataset:
        mask = training.document_mask
        data = open_dataset(name, path, tokenizer, seq_len, cache, split, document_mask=mask, log=log.info)
        check_dataset_against_model(data, args.vocab_size)
        return data

    held_out = None
    if validation.enable:
        held_out = ValidationBatches(
            opened(validation.dataset, validation.dataset_path, validation.seq_len, "validation"),
            global_batch_size=validation.local_batch_size * topology.dp,
            local_batch_size=validation.local_batch_size,
            dp_rank=topology.dp_rank(rank),
            dp_size=topology.dp,
            steps=validation.steps,
        )
    loader = DataLoader(
        opened(training.dataset, training.dataset_path, training.seq_len, "train"),
        global_batch_size=layout.global_batch_size,
        local_batch_size=training.local_batch_size,
        dp_rank=topology.dp_rank(rank),
        dp_size=topology.dp,
        seed=layout.seed,
        shuffle=training.shuffle,
        epochs=training.epochs,
        prefetch=training.dataloader.prefetch_factor or 2,
        pin_memory=training.dataloader.pin_memory,
    )
    return loader, held_out


def device_type(config: Config) -> str:
    """cpu or cuda."""
    if config.training.device != "auto":
        return config.training.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def join(config: Config, rank: int, world: int) -> torch.device:
    """Joins the process group and returns this rank's device."""
    kind = device_type(config)
    torch.use_deterministic_algorithms(
        config.debug.deterministic, warn_only=config.debug.deterministic_warn_only
    )
    if dist.is_initialized():  # a caller that forked its ranks has joined them already
        return torch.device(kind)
    timeout = timedelta(seconds=config.comm.init_timeout_seconds)
    if kind == "cuda":  # torch reads the size of its flight recorder from there, when the group is made
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(config.comm.trace_buf_size))
    # One rank without a launcher meets itself in memory
    store = None if "MASTER_ADDR" in os.environ else dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        rank=rank,
        world_size=world,
        timeout=timeout,
        store=store,
    )
    if kind == "cpu":
        keep_freed_memory()
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def settle_zero_stage(
    config: Config, args: ModelArgs, layout: Layout, device: torch.device, ranks_here: int
) -> Layout:
    """The layout with its ZeRO stage decided, where the config leaves it open: rank 0's choice, for all ranks."""
    if not leaves_zero_stage_open(config, layout.topology):
        return layout
    stage, why = least_zero_stage(config, args, layout, device.type, ranks_here)
    agreed = torch.tensor(stage, device=device)  # machines may differ in memory, and ranks must not differ in stage
    dist.broadcast(agreed, src=0)
    log.info("%s", why)
    return replace(layout, zero_stage=int(agreed))


def leave() -> None:
    """All ranks leave together: a rank that is still sending must not find its peer gone."""
    dist.barrier()
    dist.destroy_process_group()


def save_config(config: Config) -> None:
    """Writes the resolved config into the run folder."""
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    if config.job.save_config_file:
        (folder / config.job.save_config_file).write_text(to_toml(config), encoding="utf-8")
    if config.job.print_config:
        log.info("config:\n%s", to_toml(config))


def _speaks() -> bool:
    """Whether this rank says what is the same on all ranks of its node; each node has a log of its own."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0))) == 0


def _say(text: str, rank: int) -> None:
    """A text that all ranks have alike, once on each node."""
    if _speaks():
        log.log(logging.INFO if rank == 0 else logging.ERROR, "%s", text)


def _log_on_rank_0(rank: int) -> None:
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.ERROR,
        format="[titan5d] %(message)s" if rank == 0 else f"[titan5d rank {rank}] %(message)s",
        stream=sys.stderr,
        force=True,
    )
