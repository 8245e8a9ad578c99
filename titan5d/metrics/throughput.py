"""Tokens per second, TFLOP/s and MFU between two log lines.

Everything is counted once for the whole run: tokens are those of the global batch, whichever ranks share
them, and FLOPs are the model's. "Per device" is the global figure over the number of devices, so on every
mesh

    tps_per_device * devices * seconds = tokens        mfu = FLOPs / (seconds * devices * peak)

Time spent on other things (compiling, saving, validating) is taken out of the seconds and shown beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from titan5d.metrics.calibrate import Peak
from titan5d.metrics.flops import NO_RECOMPUTE, Recompute, TrainingFlops, Work, work_of


@dataclass(frozen=True)
class ThroughputReport:
    """Figures of one log interval."""

    steps: int
    tokens: int
    """Global tokens of the interval, ignored targets included."""
    seconds: float
    """Time the steps took, excluded time taken out."""
    tps: float
    """Global tokens per second."""
    tps_per_device: float
    tflops: float
    """Model TFLOP/s of one device (causal convention)."""
    hardware_tflops: float
    """The same with the recomputed forwards."""
    mfu: float | None
    """Share of the peak, 0 to 1; None when no peak is known."""
    hfu: float | None
    time_step: float
    """Seconds per step."""
    time_data: float
    """Seconds per step this rank waited for data, part of `time_step`."""
    time_excluded: float
    """Seconds of the interval that were taken out."""
    peak: Peak | None

    def metrics(self) -> dict[str, float | str | None]:
        """The values under their names in metrics.jsonl."""
        return {
            "tps": self.tps,
            "tps_per_device": self.tps_per_device,
            "tflops": self.tflops,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "time_step": self.time_step,
            "time_data": self.time_data,
            "time_data_percent": 100 * self.time_data / self.time_step,
            "time_excluded": self.time_excluded,
            "peak_flops": self.peak.flops_per_second if self.peak is not None else None,
            "peak_source": self.peak.source if self.peak is not None else None,
        }


class Throughput:
    """Adds up steps until `report` is called, then starts a new interval.

    throughput = Throughput(n_devices=8, flops=training_flops(shape), peak=peak)
    for step in ...:
        with throughput.loading_data():
            batch = next(batches)
        ...                                     # forward, backward, optimizer
        throughput.add_step(work)               # work of the global batch
        if step % log_freq == 0:
            log(throughput.report().metrics())
            with throughput.excluded():
                save()
    """

    def __init__(
        self,
        n_devices: int,
        flops: TrainingFlops,
        peak: Peak | None = None,
        recompute: Recompute = NO_RECOMPUTE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`n_devices`: all ranks of the run, whatever they cut. `clock`: seconds, monotonic."""
        self.n_devices = n_devices
        self.flops = flops
        self.peak = peak
        self.recompute = recompute
        self.clock = clock
        self._start_interval()

    def _start_interval(self) -> None:
        self._start = self.clock()
        self._steps = 0
        self._work = Work(tokens=0, squares=0)
        self._data_seconds = 0.0
        self._excluded_seconds = 0.0

    def add_step(self, work: Work) -> None:
        """Counts one optimizer step; `work` is summed over micro-batches and over the data-parallel ranks.

        Ranks that share rows (tensor, context, pipeline peers) must not add theirs again.
        """
        self._steps += 1
        self._work += work

    def exclude(self, seconds: float) -> None:
        """Takes `seconds` that were not training out of the current interval."""
        if seconds < 0:
            raise ValueError(f"cannot exclude {seconds} s: time is not negative")
        self._excluded_seconds += seconds

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Takes the time of the block out of the current interval."""
        start = self.clock()
        try:
            yield
        finally:
            self.exclude(self.clock() - start)

    @contextmanager
    def loading_data(self) -> Iterator[None]:
        """Counts the time of the block as waiting for data; it stays part of the step."""
        start = self.clock()
        try:
            yield
        finally:
            self._data_seconds += self.clock() - start

    def report(self) -> ThroughputReport:
        """The figures since the last report, and a new interval.

        Raises ValueError when there was no step, or when more time was excluded than passed.
        """
        passed = self.clock() - self._start
        seconds = passed - self._excluded_seconds
        if self._steps == 0:
            raise ValueError("no step was added since the last report, so there is nothing to divide")
        if seconds <= 0:
            raise ValueError(
                f"{self._excluded_seconds:.3f} s were excluded of an interval of {passed:.3f} s with"
                f" {self._steps} steps; exclude only time that passed inside it"
            )
        device_seconds = seconds * self.n_devices
        model = self.flops.model_flops(self._work) / device_seconds
        hardware = self.flops.hardware_flops(self._work, self.recompute) / device_seconds
        peak = self.peak.flops_per_second if self.peak is not None else None
        report = ThroughputReport(
            steps=self._steps,
            tokens=self._work.tokens,
            seconds=seconds,
            tps=self._work.tokens / seconds,
            tps_per_device=self._work.tokens / device_seconds,
            tflops=model / 1e12,
            hardware_tflops=hardware / 1e12,
            mfu=model / peak if peak is not None else None,
            hfu=hardware / peak if peak is not None else None,
            time_step=seconds / self._steps,
            time_data=self._data_seconds / self._steps,
            time_excluded=self._excluded_seconds,
            peak=self.peak,
        )
        self._start_interval()
        return report


def work_of_rows(
    n_rows: int, seq_len: int, document_ids: torch.Tensor | None, window: int | None = None
) -> Work:
    """The work of one micro-batch on this rank: `n_rows` rows of `seq_len` tokens.

    document_ids: (B, S) integers, constant within a document, or None when each row is one document. A
    document ends where its id changes and at the end of its row. `window`: the model's sliding window, if
    any.
    """
    if document_ids is None:
        one_row = work_of([seq_len], window)
        return Work(
            n_rows * one_row.tokens,
            n_rows * one_row.squares,
            n_rows * one_row.window_squares,
        )
    if tuple(document_ids.shape) != (n_rows, seq_len):
        raise ValueError(
            f"document_ids has shape {tuple(document_ids.shape)}, not ({n_rows}, {seq_len}) like the tokens"
        )
    starts = torch.ones(n_rows, seq_len, dtype=torch.bool)  # (B, S): True where a document begins
    starts[:, 1:] = (document_ids[:, 1:] != document_ids[:, :-1]).cpu()
    positions = starts.flatten().nonzero().flatten()  # (n_documents,): starts in the flattened rows
    lengths = torch.diff(positions, append=torch.tensor([n_rows * seq_len]))
    return work_of(lengths.tolist(), window)
