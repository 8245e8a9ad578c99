"""Traces for a closer look: Kineto traces of a few steps, and snapshots of the CUDA allocator.

    <run folder>/profile_traces/step-N/rank-R.json       every profile_freq steps: the last profiler_active of them; for
                                                         chrome://tracing, Perfetto or TensorBoard's profile plugin
    <run folder>/memory_snapshot/step-N/rank-R.pickle    every profile_freq steps, and when memory runs out: for
                                                         https://pytorch.org/memory_viz

Every rank writes its own. A cycle is  wait ... warmup, active: between two traces nothing is recorded.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from titan5d.config.schema_execution import Profiling

log = logging.getLogger("titan5d")

SNAPSHOT_EVENTS = 100_000
"""Allocations and frees the CUDA allocator remembers; a snapshot of them is tens of MiB."""


class Profiler:
    """Records what `config` asks for while its `with` block runs.

    Args:
        folder: the run's folder.
        step: the last step done.
    """

    def __init__(self, config: Profiling, folder: Path, device: torch.device, rank: int, step: int) -> None:
        self.config, self.folder, self.device, self.rank, self.step = config, folder, device, rank, step
        self._kineto: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> Profiler:
        config = self.config
        if config.enable_profiling:
            recorded = config.profiler_warmup + config.profiler_active
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._kineto = self._stack.enter_context(
                torch.profiler.profile(
                    activities=activities,
                    schedule=torch.profiler.schedule(
                        wait=config.profile_freq - recorded,
                        warmup=config.profiler_warmup,
                        active=config.profiler_active,
                    ),
                    on_trace_ready=self._write_trace,
                    record_shapes=True,
                    # in overlapped slots a thread of its own computes a micro-batch (parallel/turns.py)
                    experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
                )
            )
        if config.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        return self

    def after_step(self, step: int) -> None:
        """To be called at the end of each step."""
        self.step = step
        if self._kineto is not None:
            self._kineto.step()
        if self.config.enable_memory_snapshot and step % self.config.profile_freq == 0:
            self._write_snapshot(f"step-{step}")

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self.config.enable_memory_snapshot:
            if kind is not None and issubclass(kind, torch.OutOfMemoryError):
                self._write_snapshot(f"step-{self.step + 1}-out-of-memory")
            torch.cuda.memory._record_memory_history(enabled=None)
        self._stack.__exit__(kind, *error)

    def _write_trace(self, kineto: Any) -> None:
        path = self.folder / self.config.save_traces_folder / f"step-{self.step}" / f"rank-{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        kineto.export_chrome_trace(str(path))
        log.info("trace of step %d: %s (%.1f s)", self.step, path, time.monotonic() - begin)

    def _write_snapshot(self, name: str) -> None:
        path = self.folder / self.config.save_memory_snapshot_folder / name / f"rank-{self.rank}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        log.info("memory snapshot: %s", path)
