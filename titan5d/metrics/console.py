"""The line a run prints at each logged step, with how far it is and how long it still takes.

step: 10  loss: 7.1234  grad_norm: 1.2345  memory: 12.34GiB(15.5%)  tps: 1,234  tflops: 12.3  mfu: 4.51%  ...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from titan5d.metrics.names import MetricValue

RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN, PLAIN = (f"\033[{code}m" for code in (31, 32, 33, 34, 35, 36, 39))


class ConsoleWriter:
    """Prints one line a logged step; colours only on a terminal and when `color` allows them."""

    def __init__(
        self,
        total_steps: int,
        color: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`color`: not metrics.disable_color_printing. `stream`: stdout unless given."""
        self.total_steps = total_steps
        self.stream = stream if stream is not None else sys.stdout
        self.color = color and self.stream.isatty()
        self.clock = clock
        self._first: tuple[int, float] | None = None  # step and time of the first line, where the eta begins

    def log(self, step: int, metrics: dict[str, MetricValue]) -> None:
        parts = [self._paint(RED, f"step: {step:>2}")]
        parts += [self._paint(color, text) for color, text in _values(metrics)]
        parts.append(f"{step}/{self.total_steps}{self._time_left(step, metrics)}")
        print("  ".join(parts), file=self.stream, flush=True)

    def close(self) -> None:
        """Nothing to end: the stream is not ours."""

    def _paint(self, color: str, text: str) -> str:
        return f"{color}{text}{PLAIN}" if self.color else text

    def _time_left(self, step: int, metrics: dict[str, MetricValue]) -> str:
        """E.g. " eta 3m12s", from the wall time per step since the first line: saves and validation count."""
        now = self.clock()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        steps_left = self.total_steps - step
        if steps_left <= 0:
            return ""
        if step > first_step:
            return f" eta {format_duration(steps_left * (now - first_time) / (step - first_step))}"
        time_step = metrics.get("time_step")
        if isinstance(time_step, float | int):
            return f" eta {format_duration(steps_left * time_step)}"
        return ""


def _values(metrics: dict[str, MetricValue]) -> list[tuple[str, str]]:
    """(color, text) of each known value, in the order people know."""
    number = {key: value for key, value in metrics.items() if isinstance(value, float | int)}
    shown = []
    if "loss" in number:
        shown.append((GREEN, f"loss: {number['loss']:.4f}"))
    if "validation_loss" in number:
        shown.append((GREEN, f"validation_loss: {number['validation_loss']:.4f}"))
    if "grad_norm" in number:
        shown.append((YELLOW, f"grad_norm: {number['grad_norm']:.4f}"))
    if "memory_peak_gib" in number:
        percent = f"({number['memory_peak_percent']:.1f}%)" if "memory_peak_percent" in number else ""
        shown.append((CYAN, f"memory: {number['memory_peak_gib']:.2f}GiB{percent}"))
    if "tps" in number:
        per_device = number.get("tps_per_device", number["tps"])
        several = per_device < 0.99 * number["tps"]
        note = f" ({per_device:,.0f}/device)" if several else ""
        shown.append((BLUE, f"tps: {number['tps']:,.0f}{note}"))
    if "tflops" in number:
        shown.append((CYAN, f"tflops: {three_digits(number['tflops'])}"))
    if "mfu" in number:
        measured = str(metrics.get("peak_source", "")).startswith("measured")
        note = " of measured peak" if measured else ""
        shown.append((MAGENTA, f"mfu: {three_digits(100 * number['mfu'])}%{note}"))
    return shown


def three_digits(value: float) -> str:
    """Three significant digits: 0.0123, 4.51, 12.3, 989; whole numbers above: 1,234."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    if abs(value) >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """45s, 3m12s, 2h05m, 3d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
