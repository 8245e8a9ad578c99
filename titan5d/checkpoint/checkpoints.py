"""The checkpoints of one run: what the trainer calls.

    start = checkpoints.start(...)         fills model, optimizer, data position; says from where
    checkpoints.after_step(step, ...)      saves when due; collects what a thread has written; agrees on stopping
    checkpoints.close(...)                 every checkpoint that was begun is complete, or the run fails

All methods are collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from titan5d.checkpoint.agreement import Agreement
from titan5d.checkpoint.async_save import Pending, Staging, write_behind
from titan5d.checkpoint.errors import CheckpointRefused, Damaged, SaveFailed
from titan5d.checkpoint.export import to_hugging_face
from titan5d.checkpoint.folder import Lock, check_writable, complete_steps, keep_latest, remove_leftovers
from titan5d.checkpoint.generators import generator_state, set_generator_state
from titan5d.checkpoint.hugging_face import MAY_LACK, open_hugging_face
from titan5d.checkpoint.load import fill_model, fill_optimizer, named, newest, open_checkpoint
from titan5d.checkpoint.manifest import Manifest
from titan5d.checkpoint.save import begin, blocks_to_write, finish, share_out, write_share
from titan5d.checkpoint.source import CheckpointSource, read_whole
from titan5d.checkpoint.state import Block, model_blocks, optimizer_blocks
from titan5d.config.schema import Checkpoint, Config
from titan5d.data.errors import DataError
from titan5d.data.loader import DataLoader
from titan5d.launch.watchdog import GRACE
from titan5d.models.decoder import Decoder

log = logging.getLogger("titan5d")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STATE_PER_PARAMETER = 3
"""Parameters, and two moments of their size: what a checkpoint may take, for the check of free space."""


@dataclass(frozen=True)
class Start:
    """Where a run begins: the last step already done, and the counters of the run so far."""

    step: int = 0
    run: Mapping[str, float] = field(default_factory=dict)


class Checkpoints:
    """Saves and loads the state of one run.

    Args:
        layout: the degrees, in words.

    Raises CheckpointRefused on all ranks when the folder cannot be used.
    """

    def __init__(
        self,
        config: Config,
        layout: str,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader,
        device: torch.device,
    ) -> None:
        self.config: Checkpoint = config.checkpoint
        self.last_step = config.training.steps
        self.optimizer_name, self.tokenizer = config.optimizer.name, config.model.tokenizer_path
        self.family, self.layout = config.model.name, layout
        self.model, self.optimizer, self.loader, self.device = model, optimizer, loader, device
        self.folder = Path(config.job.dump_folder) / self.config.folder
        self.agreement = Agreement(config.comm.files_timeout_seconds + GRACE)
        self.saves = self.config.enable and not self.config.load_only
        self.saved_step: int | None = None
        self.pending: Pending | None = None
        self.lock: Lock | None = None
        self.chosen = share_out(model_blocks(model), self.agreement)
        pinned = self.config.async_mode == "async_with_pinned_mem" and device.type == "cuda"
        if self.config.async_mode == "async_with_pinned_mem" and not pinned:
            log.info("checkpoint.async_mode: there is no page-locked memory on the CPU, copies are plain")
        self.staging = Staging(pinned)
        if self.saves:
            self._take_folder()

    def _take_folder(self) -> None:
        weights = sum(block.local.nbytes for block in model_blocks(self.model) if block.home in self.chosen)
        needed = sum(self.agreement.gather(weights)) * STATE_PER_PARAMETER
        problems = self.agreement.problems(check_writable(self.folder, self.agreement.rank, needed))
        if not problems and self.agreement.rank == 0:
            try:
                self.lock = Lock(self.folder)
                remove_leftovers(self.folder)
            except CheckpointRefused as refused:
                problems = refused.problems
            except OSError as error:
                problems = [f"{error.filename}: {error.strerror} (errno {error.errno})"]
        if problems := self.agreement.from_rank_0(problems):
            raise CheckpointRefused(problems)

    # -- loading ---------------------------------------------------------------------------------------------------

    def start(self) -> Start:
        """Fills the state from where the config says, and says so in one line. Raises CheckpointRefused."""
        given = self.config.initial_load_path
        if self.config.enable:
            if self.config.load_step >= 0:
                found = named(self.folder, self.config.load_step, self.agreement)
            else:
                found = newest(self.folder, self.last_step, self.agreement)
            for skipped in found.skipped:
                log.warning("checkpoint passed over: %s", skipped)
            if found.folder is not None and found.manifest is not None:
                if given:
                    log.info(
                        "checkpoint.initial_load_path %s is not used: the run folder has checkpoints", given
                    )
                self.saved_step = found.manifest.step
                return self._restore(found.folder, found.manifest, weights_only=False)
        if given is None:
            where = f"; no complete checkpoint in {self.folder}" if self.config.enable else ""
            log.info("weights: drawn anew from training.seed%s", where)
            return Start()
        path = Path(given).expanduser()
        if self.config.initial_load_in_hf:
            source = open_hugging_face(path, self.family, self.model.args, self.agreement)
            fill_model(self.model, source, str(path), self.agreement, MAY_LACK)
            log.info("weights: from %s (Hugging Face's format)", path)
            return Start()
        try:
            manifest = open_checkpoint(path, self.agreement)
        except Damaged as error:
            inside = complete_steps(path) if path.is_dir() else []
            hint = (
                f"; it holds {', '.join(f'step-{step}' for step in inside)}: name one of them"
                if inside
                else ""
            )
            raise CheckpointRefused([f"checkpoint.initial_load_path: {error}{hint}"]) from None
        return self._restore(path, manifest, weights_only=self.config.initial_load_model_only)

    def _restore(self, folder: Path, manifest: Manifest, weights_only: bool) -> Start:
        left_out = self.config.exclude_from_loading
        if manifest.kind != "full" and not weights_only and manifest.step < self.last_step:
            raise CheckpointRefused(
                [
                    f"{folder} holds only weights; it can start a run (checkpoint.initial_load_path with"
                    " initial_load_model_only = true), not continue one"
                ]
            )
        ours = CheckpointSource(folder, manifest)
        if manifest.kind == "hugging_face":
            source = open_hugging_face(folder, self.family, self.model.args, self.agreement)
            fill_model(self.model, source, str(folder), self.agreement, MAY_LACK)
        elif "model" not in left_out:
            fill_model(self.model, ours, str(folder), self.agreement)
        if weights_only:
            log.info("weights: from %s (step %d), the weights alone", folder, manifest.step)
            return Start()
        if manifest.kind == "full":
            if "optimizer" not in left_out:
                self._restore_optimizer(folder, manifest, ours)
            if "dataloader" not in left_out:
                try:
                    self.loader.resume(manifest.data)
                except DataError as error:  # every rank has the same data
                    raise CheckpointRefused([str(error)]) from None
            if "generators" not in left_out:
                self._restore_generators(manifest, ours)
        text = f", without {', '.join(left_out)}" if left_out else ""
        log.info("weights: from %s, continuing after step %d%s", folder, manifest.step, text)
        return Start(manifest.step, manifest.run)

    def _restore_optimizer(self, folder: Path, manifest: Manifest, source: CheckpointSource) -> None:
        if manifest.optimizer != self.optimizer_name:
            raise CheckpointRefused(
                [
                    f"{folder} holds the state of optimizer.name = {manifest.optimizer!r}, this run has"
                    f" {self.optimizer_name!r}; use the same, or start its state anew with"
                    ' checkpoint.exclude_from_loading = ["optimizer"]'
                ]
            )
        fill_optimizer(self.model, self.optimizer, source, str(folder), self.agreement)

    def _restore_generators(self, manifest: Manifest, source: CheckpointSource) -> None:
        if manifest.layout != self.layout:
            log.info(
                "saved on %s, continuing on %s: random generators start anew", manifest.layout, self.layout
            )
            return
        prefix = f"generators.{self.agreement.rank}."
        keys = [key for key in manifest.tensors if key.startswith(prefix)]
        set_generator_state({key.removeprefix(prefix): read_whole(source, key) for key in keys}, self.device)

    # -- saving ----------------------------------------------------------------------------------------------------

    def after_step(self, step: int, stop: int, run: Mapping[str, float]) -> int:
        """Saves if this step is due, and agrees with all ranks on stopping after it.

        Args:
            stop: 0, or why this rank was asked to stop (a signal's number).
            run: counters to go on with.

        Returns the highest `stop` of all ranks. Raises SaveFailed on all ranks.
        """
        stop, busy = self.agreement.most(stop, int(self.pending is not None and self.pending.busy))
        if self.pending is not None and not busy:
            self._collect()
        if self.saves and (stop or self._due(step)):
            self.save(step, run)
        return stop

    def _due(self, step: int) -> bool:
        first = step == 1 and self.config.enable_first_step_checkpoint
        return first or step % self.config.interval == 0 or step == self.last_step

    def save(self, step: int, run: Mapping[str, float]) -> None:
        """Saves the state of now. In an async mode it is complete only later. Raises SaveFailed on all ranks."""
        if self.saved_step == step:
            return
        if self.pending is not None:
            started = time.monotonic()
            waited = self.pending.busy
            self._collect()
            if waited:
                log.info(
                    "the checkpoint of step %d waited %.1f s for the one before: the disk is slower than the interval",
                    step,
                    time.monotonic() - started,
                )
        weights_only = step == self.last_step and self.config.last_save_model_only
        started = time.monotonic()
        partial = begin(self.folder, step, self.agreement)
        manifest = self._manifest(step, run, weights_only)
        blocks = blocks_to_write(self._blocks(weights_only), self.chosen)
        dtype = DTYPES[self.config.export_dtype] if weights_only else None
        if self.config.async_mode == "disabled" or (weights_only and self.config.last_save_in_hf):
            written = write_share(partial, self.agreement.rank, blocks, dtype, {})
            if weights_only and self.config.last_save_in_hf:
                family, args = self.family, self.model.args
                written = to_hugging_face(partial, written, family, args, self.tokenizer, self.agreement)
                manifest = replace(manifest, kind="hugging_face")
            finish(partial, manifest, written, self.agreement)
            self.saved_step = step
            self._saved(step, f"saved in {time.monotonic() - started:.2f} s")
            return
        copies = self.staging.copy(blocks)
        self.pending = write_behind(partial, manifest, self.agreement.rank, blocks, dtype, copies)
        self.saved_step = step
        log.info("checkpoint step-%d: copied in %.2f s, being written", step, time.monotonic() - started)

    def _blocks(self, weights_only: bool) -> list[Block]:
        blocks = model_blocks(self.model)
        if weights_only:
            return blocks
        blocks += optimizer_blocks(self.model, self.optimizer)
        for name, state in generator_state(self.device).items():
            key = f"generators.{self.agreement.rank}.{name}"
            home = (key, (0,) * state.dim())
            self.chosen.add(home)
            blocks.append(Block(key, tuple(state.shape), home[1], state, home))
        return blocks

    def _manifest(self, step: int, run: Mapping[str, float], weights_only: bool) -> Manifest:
        model: dict[str, Any] = {"name": self.family, "args": asdict(self.model.args)}
        if weights_only:
            return Manifest(step, "weights", self.layout, run=dict(run), model=model)
        data = self.loader.state()
        return Manifest(step, "full", self.layout, self.optimizer_name, data, dict(run), model)

    def _collect(self) -> None:
        """Waits for all writers and completes the checkpoint."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        written = pending.wait()
        try:
            finish(pending.partial, pending.manifest, written, self.agreement)
        except SaveFailed:
            self.saved_step = None
            raise
        self._saved(pending.manifest.step, "complete")

    def _saved(self, step: int, how: str) -> None:
        log.info("checkpoint %s: %s", self.folder / f"step-{step}", how)
        if self.agreement.rank == 0:
            try:
                gone = keep_latest(self.folder, self.config.keep_latest_k, step)
            except OSError as error:  # the new one is complete; too many old ones harm nobody
                log.warning("old checkpoints in %s could not be deleted: %s", self.folder, error)
            else:
                if gone:
                    log.info("checkpoint.keep_latest_k: deleted step %s", ", ".join(map(str, sorted(gone))))
        self.agreement.most(0)  # deleting may take longer than a training collective would wait

    def close(self) -> None:
        """Completes what is being written. Raises SaveFailed on all ranks."""
        if self.pending is not None:
            self._collect()

    def abandon(self) -> None:
        """After a failure, on this rank alone: ends without waiting for other ranks."""
        if self.pending is not None:
            self.pending.thread.join()
        if self.lock is not None:
            self.lock.release()
