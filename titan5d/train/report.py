"""What a run says: console, metrics.jsonl, TensorBoard, the consumed samples, the closing summary.

Every value is global and equal on all ranks; rank 0 alone writes it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn

from titan5d.config.check import Layout
from titan5d.config.schema import Config
from titan5d.data.dataset import MicroBatch
from titan5d.metrics.calibrate import Peak, find_peak
from titan5d.metrics.console import ConsoleWriter
from titan5d.metrics.flops import FULL_RECOMPUTE, NO_RECOMPUTE, Recompute, flop_shape, training_flops
from titan5d.metrics.memory import MemoryMonitor
from titan5d.metrics.names import MetricValue
from titan5d.metrics.phases import StepPhases
from titan5d.metrics.pipeline_trace import PipelineTrace
from titan5d.metrics.stragglers import Stragglers
from titan5d.metrics.summary import MFU_CONVENTION, ClosingSummary
from titan5d.metrics.throughput import Throughput
from titan5d.metrics.writers import (
    JsonlWriter,
    MetricsLogger,
    TensorBoardWriter,
    WandbWriter,
    Writer,
    keep_steps_before,
)
from titan5d.models.args import ModelArgs, count_parameters
from titan5d.parallel.mesh import Meshes
from titan5d.train.step import StepResult

log = logging.getLogger("titan5d")


class RunReport:
    """Collects what each step did and writes it every `metrics.log_freq` steps. `log` calls are collective."""

    def __init__(
        self,
        config: Config,
        args: ModelArgs,
        layout: Layout,
        meshes: Meshes,
        device: torch.device,
        step: int = 0,
    ) -> None:
        """`step`: the last step already done, when a run continues."""
        self.config, self.layout, self.meshes, self.device = config, layout, meshes, device
        self.folder = Path(config.job.dump_folder)
        self.args = args
        self.memory = MemoryMonitor(device)
        self.peak = self._peak()
        self.tokens_seen = 0
        self.skipped_steps = 0
        self.steps_done = step
        self.summary = ClosingSummary()
        self.logger = MetricsLogger(self._writers(step + 1) if dist.get_rank() == 0 else [])
        self.pipeline_trace: PipelineTrace | None = (
            None  # measures every step, is written when a step is logged
        )
        self.samples: TextIO | None = None
        if config.debug.log_samples:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"samples-rank{dist.get_rank()}.jsonl"
            keep_steps_before(path, step + 1)
            self.samples = path.open("a", encoding="utf-8")
        self.phases = StepPhases(device, meshes.groups())
        self.stragglers = Stragglers(meshes.groups(), meshes.coordinates["pp"], device)
        # last: its clock starts now, and opening the writers is no training
        self.throughput = Throughput(
            layout.topology.world_size, training_flops(flop_shape(args)), self.peak, self._recompute()
        )

    def start(self, model: nn.Module) -> None:
        """Says what is about to run."""
        count, training, layout = count_parameters(self.args), self.config.training, self.layout
        log.info("%s", self.config.job.description)
        log.info(
            "model %s %s: %s parameters; %s on %s, zero_stage %d",
            self.config.model.name,
            self.config.model.flavor,
            f"{count.total:,}",
            layout.topology,
            self.device.type,
            layout.zero_stage,
        )
        log.info(
            "%d steps of %d rows x %d tokens (%d micro-batches of %d rows on each data-parallel rank), data: %s",
            training.steps,
            layout.global_batch_size,
            training.seq_len,
            layout.accumulation,
            training.local_batch_size,
            training.dataset,
        )
        if layout.pipeline is not None:
            log.info("%s", layout.pipeline)
        log.info(
            "peak %.4g TFLOP/s a device, %s. %s",
            self.peak.flops_per_second / 1e12,
            self.peak.source,
            MFU_CONVENTION,
        )
        if self.config.model.print_after_conversion:
            log.info("%s", model)

    def after_step(
        self,
        step: int,
        result: StepResult,
        lr: float,
        micro_batches: Sequence[MicroBatch],
        validation_loss: float | None,
    ) -> None:
        """Takes in one optimizer step and logs it when it is due."""
        self.steps_done = step
        self.throughput.add_step(result.counts.work)
        self.tokens_seen += result.counts.work.tokens
        self.skipped_steps += not result.updated
        if self.samples is not None:
            ids = [int(sample) for batch in micro_batches for sample in batch.sample_ids]
            self.samples.write(json.dumps({"step": step, "samples": ids}) + "\n")
            self.samples.flush()
        due = step == 1 or step % self.config.metrics.log_freq == 0 or step == self.config.training.steps
        if due or validation_loss is not None or not result.updated:
            self._log(step, result, lr, validation_loss)

    def close(self) -> None:
        """Ends the writers and prints the closing summary."""
        self.logger.close()
        if self.samples is not None:
            self.samples.close()
        if dist.get_rank() == 0:
            metrics = self.config.metrics
            tensorboard = self.folder / metrics.save_tb_folder if metrics.enable_tensorboard else None
            text = self.summary.text(
                self.steps_done, self.config.training.steps, self.folder / "metrics.jsonl", tensorboard
            )
            log.info("%s", text)

    def _log(self, step: int, result: StepResult, lr: float, validation_loss: float | None) -> None:
        values: dict[str, MetricValue] = {
            "loss": result.loss,
            "max_loss": result.max_loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": result.counts.work.tokens,
            "valid_tokens": result.counts.valid_targets,
            "n_tokens_seen": self.tokens_seen,
            "consumed_samples": step * self.layout.global_batch_size,
            "skipped_steps": self.skipped_steps,
        }
        if validation_loss is not None and not math.isnan(validation_loss):
            values["validation_loss"] = validation_loss
        values |= result.routing.metrics
        if self.pipeline_trace is not None:
            values |= self.pipeline_trace.write(step)
        figures = self.throughput.report()
        values |= figures.metrics()
        values |= self.phases.metrics()
        values |= self.stragglers.metrics(figures.time_step, figures.time_data, self.phases.exposed)
        values |= self._memory_of_the_fullest_rank()
        self.logger.log(step, values)
        if result.routing.load:
            self.logger.heat_map(
                step, "moe/load (layers x experts, white = 2 even shares)", result.routing.load
            )

    def _memory_of_the_fullest_rank(self) -> dict[str, float | int]:
        mine = self.memory.snapshot().metrics()
        self.memory.reset_peak()
        most = torch.tensor(
            [float(value) for value in mine.values()], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return dict(zip(mine, most.tolist(), strict=True))

    def _writers(self, first_step: int) -> list[Writer]:
        metrics, name = self.config.metrics, self.config.optimizer.name
        writers: list[Writer] = [
            ConsoleWriter(self.config.training.steps, color=not metrics.disable_color_printing),
            JsonlWriter(self.folder / "metrics.jsonl", first_step),
            self.summary,
        ]
        if metrics.enable_tensorboard:
            writers.append(TensorBoardWriter(self.folder / metrics.save_tb_folder, name, first_step))
        if metrics.enable_wandb:
            writers.append(WandbWriter(self.folder, name, asdict(self.config)))
        return writers

    def _peak(self) -> Peak:
        """Rank 0's answer for all: a measured peak differs from rank to rank, MFU must not."""
        dtype = torch.bfloat16 if self.config.training.mixed_precision_param == "bfloat16" else torch.float32
        peak = [
            find_peak(self.device, dtype, self.config.metrics.peak_flops) if dist.get_rank() == 0 else None
        ]
        dist.broadcast_object_list(peak, src=0)
        assert peak[0] is not None
        return peak[0]

    def _recompute(self) -> Recompute:
        ac = self.config.activation_checkpoint
        if ac.mode == "full":
            return FULL_RECOMPUTE
        if ac.mode == "selective":
            if ac.selective_ac_option == "op":
                return Recompute(matmuls=0.0, attention=1.0)
            share = len(range(0, self.args.n_layers, int(ac.selective_ac_option))) / self.args.n_layers
            return Recompute(matmuls=share, attention=share)
        return NO_RECOMPUTE
