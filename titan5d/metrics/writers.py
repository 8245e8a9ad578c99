"""Where metrics go: metrics.jsonl, TensorBoard, Weights & Biases, and a fan-out to several of them.

Exactly one rank makes real writers and hands them true global values; the others make `MetricsLogger([])`.
Every point is handed to the operating system before `log` returns, so a killed run keeps all it logged.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from titan5d.metrics.names import MetricValue, tensorboard_scalars

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """One place metrics go."""

    def log(self, step: int, metrics: dict[str, MetricValue]) -> None:
        """Writes one step's values."""

    def close(self) -> None:
        """Ends the writing; called once."""


class MetricsLogger:
    """Hands each logged step to all writers.

    A full disk must not end a training run: an OSError of one writer is logged as an error each time, the
    other writers still get the values, and the run goes on.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self.writers = list(writers)
        self._last_step: int | None = None

    def log(self, step: int, metrics: dict[str, MetricValue]) -> None:
        """Logs the values of `step`. Raises ValueError when it is not after the last: steps are unique."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step {step} was logged after step {self._last_step}; log all values of a step in one call"
            )
        self._last_step = step
        for writer in self.writers:
            try:
                writer.log(step, metrics)
            except OSError as error:
                logger.error("metrics of step %d not written by %s: %s", step, type(writer).__name__, error)

    def heat_map(self, step: int, name: str, rows: Sequence[Sequence[float]]) -> None:
        """Draws a table of numbers of `step` where pictures can be shown; see TensorBoardWriter.heat_map."""
        for writer in self.writers:
            if not isinstance(writer, TensorBoardWriter):
                continue
            try:
                writer.heat_map(step, name, rows)
            except OSError as error:
                logger.error("%s of step %d not drawn: %s", name, step, error)

    def close(self) -> None:
        for writer in self.writers:
            try:
                writer.close()
            except OSError as error:
                logger.error("closing %s: %s", type(writer).__name__, error)


class JsonlWriter:
    """One JSON object a line, one line a logged step: {"step": 10, "loss": 7.1, ...}.

    JSON has no NaN and no infinity: they are written as the strings "NaN", "Infinity" and "-Infinity", which
    Python's `float()` reads. `null` means not known.

    A run that starts again at `first_step` replaces what an earlier one logged from there on, so that each
    step is in the file once. Lines taken out, and a last line cut short by a crash, are kept in
    `<name>.replaced`.
    """

    def __init__(self, path: Path, first_step: int = 1) -> None:
        """`first_step`: the first step this run will do; 1 for a fresh start, N + 1 after loading step N."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_steps_before(path, first_step)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: dict[str, MetricValue]) -> None:
        line = {"step": step} | {key: _json_value(key, value) for key, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()  # to the kernel: survives kill -9 of this process

    def close(self) -> None:
        self._file.close()


def _json_value(key: str, value: MetricValue) -> MetricValue:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is not None and not isinstance(value, int | float | str):
        raise TypeError(
            f"metric {key!r} is a {type(value).__name__}; give a Python number (tensor.item()), str or None"
        )
    return value


def keep_steps_before(path: Path, first_step: int) -> None:
    """Moves lines of `first_step` and later, and lines that are no JSON object, to `<path>.replaced`."""
    if not path.exists():
        return
    kept, replaced = list[str](), list[str]()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        (kept if _step_of(line) < first_step else replaced).append(line + "\n")
    if replaced:
        with path.with_name(path.name + ".replaced").open("a", encoding="utf-8") as out:
            out.writelines(replaced)
    whole = path.with_name(path.name + ".tmp")
    with whole.open("w", encoding="utf-8") as out:
        out.writelines(kept)
        out.flush()
        os.fsync(out.fileno())
    whole.replace(path)  # at once: a crash here leaves the old file or the new one


def _step_of(line: str) -> float:
    """The step of a line; infinity when it is not a line of ours."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


class TensorBoardWriter:
    """Scalars for TensorBoard, under the names in names.py.

    A run that starts again at `first_step` tells TensorBoard to forget the older points from there on.
    """

    def __init__(self, folder: Path, optimizer_name: str, first_step: int = 1) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here: its import takes a second

        self.optimizer_name = optimizer_name
        self._writer: Any = SummaryWriter(log_dir=str(folder), purge_step=first_step)

    def log(self, step: int, metrics: dict[str, MetricValue]) -> None:
        for name, value in tensorboard_scalars(metrics, self.optimizer_name).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def heat_map(self, step: int, name: str, rows: Sequence[Sequence[float]]) -> None:
        """A picture of a table, 8 x 8 points a number: black = 0, grey = 1, white = 2 or more."""
        shades = (torch.tensor(rows) / 2).clamp(0, 1)  # (rows, columns)
        points = shades.repeat_interleave(8, dim=0).repeat_interleave(8, dim=1)
        self._writer.add_image(name, points, step, dataformats="HW")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """The same scalars for Weights & Biases. Each start of a run is a new W&B run."""

    def __init__(self, folder: Path, optimizer_name: str, run_config: dict[str, Any]) -> None:
        """`folder`: where W&B keeps its files. `run_config`: the resolved config, shown with the run.

        Project, entity and key are W&B's own settings (`wandb login`, WANDB_PROJECT).
        Raises ModuleNotFoundError when the wandb package is not installed.
        """
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "metrics.enable_wandb = true needs the wandb package, which is not installed;"
                " run `pip install 'titan5d[wandb]'`, or set metrics.enable_wandb = false"
            ) from error

        self.optimizer_name = optimizer_name
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(dir=str(folder), config=run_config)

    def log(self, step: int, metrics: dict[str, MetricValue]) -> None:
        self._run.log(tensorboard_scalars(metrics, self.optimizer_name), step=step)

    def close(self) -> None:
        self._run.finish()
