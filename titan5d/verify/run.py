"""The reference on one process, then one layout after the other on forked ranks: a row of a report each."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

from titan5d.config.load import ConfigError
from titan5d.launch.local_ranks import RankFailed, run_ranks
from titan5d.verify.case import case_of, reference_case, run_and_compare, run_reference_case
from titan5d.verify.compare import Check, Outcome, worst_of
from titan5d.verify.layouts import Cuts
from titan5d.verify.shrink import Small

TIME_LIMIT = 120.0
"""Seconds one layout may take."""


@dataclass(frozen=True)
class Row:
    """What became of one layout.

    Attributes:
        status: equal; breach = a check over its tolerance; failed = a rank raised, died or hung; refused = no such run.
        checks: by name the worst of all ranks and steps.
        message: why it failed or was refused.
        seconds: how long it took.
    """

    cuts: Cuts
    status: Literal["equal", "breach", "failed", "refused"]
    checks: dict[str, Check] = field(default_factory=dict)
    message: str = ""
    seconds: float = 0.0


def run_reference(small: Small, limit: float = TIME_LIMIT) -> Outcome:
    """What one process does with the case. Raises RankFailed."""
    with _folder() as folder:
        return run_ranks(run_reference_case, 1, reference_case(small), folder, timeout=limit)[0]


def run_layout(small: Small, cuts: Cuts, expected: Outcome, limit: float = TIME_LIMIT) -> Row:
    """One layout against the reference. Never raises: what goes wrong is in the row."""
    start = time.monotonic()
    try:
        case = case_of(small, cuts)
    except ConfigError as error:
        return Row(cuts, "refused", message="; ".join(error.problems))
    with _folder() as folder:
        try:
            found = run_ranks(
                run_and_compare, cuts.topology.world_size, case, folder, expected, timeout=limit
            )
        except RankFailed as failed:
            return Row(cuts, "failed", message=str(failed), seconds=time.monotonic() - start)
    checks = worst_of(list(chain.from_iterable(found)))
    equal = all(check.ok for check in checks.values())
    return Row(cuts, "equal" if equal else "breach", checks, seconds=time.monotonic() - start)


def run_layouts(small: Small, expected: Outcome, limit: float = TIME_LIMIT) -> Iterator[Row]:
    """The rows of all layouts of the case, each as soon as it is done."""
    return (run_layout(small, cuts, expected, limit) for cuts in small.layouts)


def exit_status(rows: Sequence[Row]) -> int:
    """0 every layout that is legal equals the reference, 1 one of them does not, 2 none is legal."""
    if all(row.status == "refused" for row in rows):
        return 2
    return 0 if all(row.status in ("equal", "refused") for row in rows) else 1


@contextmanager
def _folder() -> Iterator[Path]:
    """A run folder that goes away, also when its ranks were ended."""
    folder = Path(tempfile.mkdtemp(prefix="titan5d-verify-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
