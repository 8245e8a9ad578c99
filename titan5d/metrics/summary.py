"""The lines a run ends with: what it did, how fast, and where to look.

`ClosingSummary` is a writer like the others: it keeps the few values it needs of each logged step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from titan5d.metrics.console import format_duration, three_digits
from titan5d.metrics.names import EXPOSED, MetricValue

MFU_CONVENTION = (
    "counted: forward and backward of the model, attention within documents and under the causal mask,"
    " no embedding gather, no recompute (HFU has it)"
)


class ClosingSummary:
    """Collects logged steps; `text` makes the summary."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._start = clock()
        self._losses: dict[str, list[tuple[int, float]]] = {}  # (step, loss): the first and the last
        self._series: dict[str, list[float]] = {}
        self._last: dict[str, MetricValue] = {}

    def log(self, step: int, metrics: dict[str, MetricValue]) -> None:
        self._last |= metrics
        for key in ("loss", "validation_loss"):
            value = metrics.get(key)
            if isinstance(value, float | int):
                first = self._losses[key][0] if key in self._losses else (step, value)
                self._losses[key] = [first, (step, value)]
        times = [key for key in metrics if key.startswith("time_")]
        for key in ("tps", "tps_per_device", "mfu", "hfu", "memory_peak_gib", "memory_peak_percent", *times):
            value = metrics.get(key)
            if isinstance(value, float | int) and math.isfinite(value):
                self._series.setdefault(key, []).append(value)

    def close(self) -> None:
        """Nothing to end."""

    def text(self, steps_done: int, steps_asked: int, metrics_file: Path, tensorboard: Path | None) -> str:
        """The summary. `steps_done`: the last finished step, earlier starts of the run included."""
        took = format_duration(self.clock() - self._start)
        verb = "Finished" if steps_done >= steps_asked else "Stopped after"
        lines = [f"{verb} {steps_done:,} of {steps_asked:,} steps, this start took {took}"]
        for key, points in self._losses.items():
            shown = " -> ".join(f"{loss:.4f} (step {step})" for step, loss in points)
            lines.append(_line(key.replace("_", " "), shown))
        seen = self._last.get("n_tokens_seen")
        if isinstance(seen, float | int):
            lines.append(_line("tokens", f"{seen:,.0f}"))
        lines += self._speed()
        if "memory_peak_gib" in self._series:
            percent = self._series.get("memory_peak_percent")
            share = f" ({max(percent):.1f}%)" if percent else ""
            peak_gib = max(self._series["memory_peak_gib"])
            lines.append(_line("peak memory", f"{peak_gib:.2f} GiB per device{share}"))
        lines.append(_line("metrics", str(metrics_file)))
        if tensorboard is not None:
            lines.append(_line("curves", f"tensorboard --logdir {tensorboard}"))
        return "\n".join(lines)

    def _speed(self) -> list[str]:
        """Medians over the logged steps: the first, slow one does not count for more than one."""
        lines = []
        if "tps" in self._series:
            speed = f"{median(self._series['tps']):,.0f} tokens/s (median)"
            if "tps_per_device" in self._series:
                speed += f", {median(self._series['tps_per_device']):,.0f} per device"
            lines.append(_line("throughput", speed))
        if "mfu" in self._series:
            mfu = f"{three_digits(100 * median(self._series['mfu']))}% (median)"
            if "hfu" in self._series:
                mfu += f", HFU {three_digits(100 * median(self._series['hfu']))}%"
            peak, source = self._last.get("peak_flops"), self._last.get("peak_source")
            if isinstance(peak, float | int):
                mfu += f"; of {three_digits(peak / 1e12)} TFLOP/s per device, {source}"
            lines += [_line("MFU", mfu), _line("", MFU_CONVENTION)]
        return lines + self._phases()

    def _phases(self) -> list[str]:
        """What the median step consisted of, and what of that was waiting for other ranks."""
        if not self._series.keys() & {"time_forward", "time_messages"}:
            return []
        step = median(self._series["time_step"])
        names = ("data", "forward", "backward", "messages", "optimizer")
        found = [name for name in names if f"time_{name}" in self._series]
        shares = [f"{name} {self._share(f'time_{name}', step)}" for name in found]
        lines = [_line("step", f"{three_digits(1000 * step)} ms (median): {', '.join(shares)}")]
        exposed = sorted(key for key in self._series if key.startswith(EXPOSED))
        if exposed:
            waits = [f"{key.removeprefix(EXPOSED)} {self._share(key, step)}" for key in exposed]
            lines.append(_line("", f"of that, waiting for collectives: {', '.join(waits)}"))
        return lines

    def _share(self, key: str, step: float) -> str:
        return f"{100 * median(self._series[key]) / step:.0f}%"


def _line(name: str, value: str) -> str:
    return f"  {name:<16}{value}"
