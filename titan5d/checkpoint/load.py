"""Which checkpoint a run starts from, and filling the model and the optimizer with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from titan5d.checkpoint.agreement import Agreement
from titan5d.checkpoint.errors import CheckpointRefused, Damaged
from titan5d.checkpoint.folder import complete_steps, step_folders
from titan5d.checkpoint.manifest import Manifest, read_manifest, verify
from titan5d.checkpoint.source import Source
from titan5d.checkpoint.state import Block, make_optimizer_state, model_blocks, optimizer_blocks
from titan5d.models.decoder import Decoder
from titan5d.train.narrow_state import narrow_loaded_state


@dataclass
class Found:
    """The checkpoint to continue from, if there is one, and what was passed over on the way, newest first."""

    folder: Path | None = None
    manifest: Manifest | None = None
    skipped: list[str] = field(default_factory=list)


def open_checkpoint(folder: Path, agreement: Agreement) -> Manifest:
    """Reads the manifest on all ranks and verifies every file on one of them. Collective.

    Raises Damaged on all ranks with everything that is wrong.
    """
    manifest, problems = None, list[str]()
    try:
        manifest = read_manifest(folder)
    except Damaged as error:
        problems.append(str(error))
    problems = agreement.problems(problems)
    if manifest is not None and not problems:
        problems = agreement.problems(verify(folder, manifest, agreement.rank, agreement.ranks))
    if manifest is None or problems:
        raise Damaged("; ".join(problems))
    return manifest


def newest(folder: Path, last_step: int, agreement: Agreement) -> Found:
    """The newest complete checkpoint that a run of `last_step` steps can go on from. Collective.

    Weights alone are enough only for a run that is finished with them. Raises CheckpointRefused when nothing but
    weights is left.
    """
    steps = agreement.from_rank_0(list(step_folders(folder)))
    found = Found()
    weights_only = []
    for step in steps:
        candidate = folder / f"step-{step}"
        try:
            manifest = open_checkpoint(candidate, agreement)
        except Damaged as error:
            found.skipped.append(str(error))
            continue
        if manifest.kind != "full" and step < last_step:
            weights_only.append(step)
            found.skipped.append(f"{candidate} holds only weights, which is no state to go on from")
            continue
        found.folder, found.manifest = candidate, manifest
        return found
    if weights_only:
        raise CheckpointRefused(
            [
                f"{folder} holds only weights (step {', '.join(map(str, weights_only))}), and this run has"
                f" training.steps = {last_step}. Runs that shall go on beyond their last step need"
                " checkpoint.last_save_model_only = false; to start a new run from these weights, set"
                f" checkpoint.initial_load_path = {str(folder / f'step-{weights_only[0]}')!r} and another"
                " job.dump_folder"
            ]
        )
    return found


def named(folder: Path, step: int, agreement: Agreement) -> Found:
    """The checkpoint of `step`. Collective. Raises CheckpointRefused naming the steps there are."""
    candidate = folder / f"step-{step}"
    try:
        return Found(candidate, open_checkpoint(candidate, agreement))
    except Damaged as error:
        there = ", ".join(map(str, agreement.from_rank_0(sorted(complete_steps(folder))))) or "none"
        raise CheckpointRefused(
            [f"checkpoint.load_step = {step}: {error}. Complete checkpoints in {folder}: {there}"]
        ) from None


def fill_model(
    model: Decoder, source: Source, where: str, agreement: Agreement, may_lack: tuple[str, ...] = ()
) -> None:
    """Fills every weight and saved buffer of this rank. Collective. Raises CheckpointRefused on all ranks.

    Args:
        may_lack: ends of names that stay as they are when the source does not have them.
    """
    _fill(model_blocks(model), source, where, agreement, may_lack)


def fill_optimizer(
    model: Decoder, optimizer: torch.optim.Optimizer, source: Source, where: str, agreement: Agreement
) -> None:
    """Makes the state the checkpoint has of every parameter, and fills it. Collective. Raises CheckpointRefused."""
    fields: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, spec in source.specs().items():
        part, _, rest = key.partition(".")
        if part == "optimizer":
            name, parameter = rest.split(".", 1)
            fields.setdefault(parameter, {})[name] = spec.shape
    make_optimizer_state(model, optimizer, fields)
    _fill(optimizer_blocks(model, optimizer), source, where, agreement)
    narrow_loaded_state(optimizer)


@torch.no_grad()
def _fill(
    blocks: Sequence[Block], source: Source, where: str, agreement: Agreement, may_lack: tuple[str, ...] = ()
) -> None:
    specs, problems, wanted = source.specs(), list[str](), list[Block]()
    for block in blocks:
        if block.key not in specs:
            if not block.key.endswith(may_lack):
                problems.append(f"{block.key} is not in it")
        elif specs[block.key].shape != block.shape:
            problems.append(f"{block.key} has shape {specs[block.key].shape} there and {block.shape} here")
        else:
            wanted.append(block)
    _refuse(where, agreement.problems(problems))
    for block in wanted:
        try:
            source.read_into(block.key, block.offset, block.local)
        except Damaged as error:
            problems.append(str(error))
            break
    _refuse(where, agreement.problems(problems))


def _refuse(where: str, problems: list[str]) -> None:
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointRefused([f"{where} does not fit this model: {'; '.join(problems[:5])}{more}"])
