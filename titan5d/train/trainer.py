"""The run: builds everything once, then counts steps."""

from __future__ import annotations

import gc
import logging
import time
from contextlib import closing
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from titan5d.checkpoint.checkpoints import Checkpoints
from titan5d.checkpoint.generators import seed_generators
from titan5d.config.check import Layout
from titan5d.config.schema import Config
from titan5d.data.loader import DataLoader
from titan5d.data.validation import ValidationBatches
from titan5d.launch.exit_status import DONE, FAILED, STOPPED
from titan5d.launch.signals import StopSignals, signal_name
from titan5d.launch.watchdog import GRACE, Progress
from titan5d.metrics.phases import BETWEEN
from titan5d.metrics.pipeline_trace import PipelineTrace
from titan5d.metrics.profiling import Profiler
from titan5d.models.args import ModelArgs
from titan5d.parallel.audit import GradientAudit
from titan5d.parallel.low_precision import scale_after_updates
from titan5d.parallel.mesh import Meshes
from titan5d.train.build import DTYPES, build_model, build_pipeline, low_precision
from titan5d.train.lr_schedule import LRSchedule
from titan5d.train.optimizer import build_optimizer
from titan5d.train.report import RunReport
from titan5d.train.step import StepResult, train_step
from titan5d.train.validate import validation_loss

log = logging.getLogger("titan5d")

TIME_IS_UP = 1000
"""Why a run stops, beside the numbers of signals: job.max_minutes."""


class Trainer:
    """One run on this rank. Building it is collective; `run` trains and returns the exit status."""

    def __init__(
        self,
        config: Config,
        args: ModelArgs,
        layout: Layout,
        loader: DataLoader,
        held_out: ValidationBatches | None,
        device: torch.device,
    ) -> None:
        self.config, self.args, self.layout, self.device = config, args, layout, device
        self.started = time.monotonic()
        training = config.training
        self.time_limit = float(config.comm.init_timeout_seconds)  # of a collective
        seed_generators(layout.seed, dist.get_rank())
        self.meshes = Meshes(
            layout.topology,
            device.type,
            timedelta(seconds=self.time_limit + GRACE),
            has_experts=args.n_experts > 0,
        )

        self.loader, self.held_out = loader, held_out
        self.model = build_model(config, args, layout, self.meshes, device)
        self.pipeline = build_pipeline(config, layout, self.meshes, self.model, device)
        self.optimizer = build_optimizer(
            self.model.named_parameters(), config.optimizer, DTYPES[training.mixed_precision_param]
        )
        scale_after_updates(self.model, self.optimizer, low_precision(config))
        self.lr = LRSchedule(self.optimizer, config.lr_scheduler, training.steps)
        self.checkpoints = Checkpoints(
            config, str(layout.topology), self.model, self.optimizer, loader, device
        )
        start = self.checkpoints.start()
        self.step = start.step
        self.skipped_in_a_row = int(start.run.get("skipped_in_a_row", 0))
        self.report = RunReport(config, args, layout, self.meshes, device, self.step)
        self.phases = self.report.phases
        self.phases.traced = config.profiling.enable_profiling
        self.profiler = Profiler(config.profiling, self.report.folder, device, dist.get_rank(), self.step)
        self.audit = GradientAudit(self.model, self.meshes) if config.debug.audit_gradients else None
        self.report.tokens_seen = int(start.run.get("tokens_seen", 0))
        self.report.skipped_steps = int(start.run.get("skipped_steps", 0))
        if config.profiling.pipeline_trace and self.pipeline is not None:
            folder = self.report.folder / config.profiling.save_traces_folder
            group = self.pipeline.groups.down
            self.report.pipeline_trace = PipelineTrace(self.pipeline.schedule, group, device, folder)
            self.pipeline.trace = self.report.pipeline_trace

    def run(self) -> int:
        """Trains until the last step. Returns the exit status: 0 when all that was asked for was done."""
        if self.config.checkpoint.create_seed_checkpoint:
            self.checkpoints.save(self.step, self._counters())
            self.checkpoints.close()
            return DONE
        if self.config.training.gc_freq:
            gc.disable()  # collections at different times on different ranks stall all of them
        self.report.start(self.model)
        try:
            with StopSignals() as signals, self.profiler:
                status = self._train(signals)
                self.checkpoints.close()
        finally:
            self.report.close()
            self.checkpoints.abandon()
        return status

    def progress(self) -> Progress:
        """Where this rank stands; asked by the watchdog's thread."""
        phase = "" if self.phases.current == BETWEEN else self.phases.current
        return Progress(self.step, phase, self.phases.since, self.time_limit)

    def _train(self, signals: StopSignals) -> int:
        training, first, stop = self.config.training, self.step + 1, 0
        with closing(iter(self.loader)) as batches:
            while self.step < training.steps and not stop:
                with self.phases("data"), self.report.throughput.loading_data():
                    micro_batches = next(batches, None)
                if micro_batches is None:
                    return self._data_ended()
                self.step += 1
                self.lr.set_step(self.step)
                with self.phases.step():
                    result = train_step(
                        self.model,
                        self.optimizer,
                        micro_batches,
                        self.meshes,
                        self.layout.zero_stage,
                        training.max_norm,
                        self.device,
                        self.pipeline,
                        self.phases,
                        self.audit,
                    )
                if self.step == first:
                    self.time_limit = float(self.config.comm.train_timeout_seconds)
                    self.meshes.set_timeout(timedelta(seconds=self.time_limit + GRACE))
                with self.phases("validation"):
                    validation = self._validate_if_due()
                with self.phases("report"):
                    self.report.after_step(self.step, result, self.lr.lr, micro_batches, validation)
                with self.report.throughput.excluded():
                    self.profiler.after_step(self.step)
                if self._too_many_skipped(result):
                    return FAILED
                with self.phases("checkpoint"), self.report.throughput.excluded():
                    asked = self._asked_to_stop(signals)
                    stop = self.checkpoints.after_step(self.step, asked, self._counters())
                if training.gc_freq and self.step % training.gc_freq == 0:
                    self._collect_garbage()
        return self._stopped(stop) if self.step < training.steps else DONE

    def _data_ended(self) -> int:
        log.warning(
            "the data ended at step %d of %d, after the %d epochs asked for (training.epochs)",
            self.step,
            self.config.training.steps,
            self.config.training.epochs,
        )
        if self.checkpoints.saves and self.step:
            self.checkpoints.save(self.step, self._counters())
        return DONE

    def _asked_to_stop(self, signals: StopSignals) -> int:
        limit = 60 * self.config.job.max_minutes
        return TIME_IS_UP if limit and time.monotonic() - self.started >= limit else signals.asked

    def _stopped(self, stop: int) -> int:
        why = (
            f"job.max_minutes = {self.config.job.max_minutes:g}" if stop == TIME_IS_UP else signal_name(stop)
        )
        done = f"{why}: stopped after step {self.step} of {self.config.training.steps}"
        if self.checkpoints.saved_step == self.step:
            log.info("%s; it is saved, and the same command goes on from there", done)
            return STOPPED
        log.error("%s; nothing was saved (checkpoint.enable = true saves)", done)
        return FAILED

    def _counters(self) -> dict[str, float]:
        """What a checkpoint keeps of the run beside weights, optimizer and data."""
        return {
            "tokens_seen": self.report.tokens_seen,
            "skipped_steps": self.report.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def _too_many_skipped(self, result: StepResult) -> bool:
        """A step without a finite gradient is left out and counted; too many in a row end the run."""
        if result.updated or result.counts.valid_targets == 0:
            self.skipped_in_a_row = 0
            return False
        self.skipped_in_a_row += 1
        limit = self.config.training.max_skipped_steps
        log.warning("step %d: gradient norm %s, update left out", self.step, result.grad_norm)
        if self.skipped_in_a_row <= limit:
            return False
        log.error(
            "%d steps in a row had no finite gradient (training.max_skipped_steps = %d): stopping",
            self.skipped_in_a_row,
            limit,
        )
        return True

    def _collect_garbage(self) -> None:
        found = gc.collect(2 if self.config.training.gc_debug else 1)
        if self.config.training.gc_debug:
            log.info("garbage collection at step %d found %d objects", self.step, found)

    def _validate_if_due(self) -> float | None:
        """Loss on the held-out batches, the same ones every round; None at steps without a round."""
        validation = self.config.validation
        last = self.step == self.config.training.steps
        if self.held_out is None or not (last or self.step % validation.freq == 0):
            return None
        with self.report.throughput.excluded():
            batches = chain.from_iterable(self.held_out)
            return validation_loss(self.model, batches, self.meshes, self.device, self.pipeline)
