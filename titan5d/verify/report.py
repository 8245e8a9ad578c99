"""The rows of a verification as a table for people and as one object for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from titan5d.verify.compare import GRADIENT, LOSS, Check, Outcome
from titan5d.verify.layouts import Cuts
from titan5d.verify.run import Row
from titan5d.verify.shrink import Small

_TOLERANCES = {"loss": LOSS, "max_loss": LOSS, "gradients": GRADIENT, "norm": GRADIENT, "weights": GRADIENT}
_WIDTH = 9


class Table:
    """A line for each layout, so that each can be printed when it is done."""

    def __init__(self, layouts: Sequence[Cuts], expected: Outcome, compiled: bool) -> None:
        self.columns = [*_TOLERANCES, *(["routers"] if expected.routers else []), "metrics"]
        self.columns += ["graphs"] if compiled else []
        self._first = max(len("tolerance"), *(len(str(cuts)) for cuts in layouts))

    def head(self) -> str:
        """Names and tolerances of the checks."""
        tolerances = _TOLERANCES | {"routers": GRADIENT, "metrics": LOSS, "graphs": 0.0}
        names = "".join(f"{name:>{_WIDTH + 1}}" for name in self.columns)
        limits = "".join(f"{tolerances[name]:>{_WIDTH + 1}.0e}" for name in self.columns)
        first = self._first
        return f"{'layout':{first}}  ranks{names}  seconds  worst parameter\n{'tolerance':{first}}       {limits}"

    def line(self, row: Row) -> str:
        """One layout; what is over its tolerance has a mark and a line of its own."""
        start = f"{row.cuts!s:{self._first}}  {row.cuts.topology.world_size:5}"
        if row.status in ("refused", "failed"):
            return f"{start}  {row.status}: {row.message}"
        cells = "".join(
            f"{_cell(row.checks[name]):>{_WIDTH + 1}}" for name in self.columns if name in row.checks
        )
        lines = [f"{start}{cells}  {row.seconds:7.1f}  {worst_parameter(row)}"]
        lines += [f"    ! {explained(check)}" for check in row.checks.values() if not check.ok]
        return "\n".join(lines)


def worst_parameter(row: Row) -> str:
    """Where the largest error of gradients and weights occurred."""
    tensors = [row.checks[name] for name in ("gradients", "weights") if name in row.checks]
    return max(tensors, key=lambda check: math.inf if math.isnan(check.error) else check.error).where


def explained(check: Check) -> str:
    """A breach in words."""
    hint = ""
    if check.name == "routers":
        hint = (
            " (if only a few tokens changed their expert: two scores were equal to rounding; another --training.seed"
            " tells)"
        )
    return f"{check.name} {check.error:.1e} > {check.tolerance:.0e}: {check.where}{hint}"


def verdict(rows: Sequence[Row]) -> str:
    """The outcome in a sentence."""
    ran = [row for row in rows if row.status != "refused"]
    refused = f"; {len(rows) - len(ran)} refused" if len(ran) < len(rows) else ""
    bad = [str(row.cuts) for row in ran if row.status != "equal"]
    if not ran:
        return f"no layout ran: all {len(rows)} are refused"
    if bad:
        return f"{len(bad)} of {len(ran)} layouts do NOT train the model of one process: {', '.join(bad)}{refused}"
    many = "the layout trains" if len(ran) == 1 else f"all {len(ran)} layouts train"
    return f"{many} the model of one process{refused}"


def as_object(name: str, small: Small, expected: Outcome, rows: Sequence[Row]) -> dict[str, Any]:
    """One object for --json. Errors that are no number (something missing) are null."""
    return {
        "config": name,
        "shrunk": small.notes,
        "reference": expected.metrics,
        "layouts": [_row_object(row) for row in rows],
        "equal": bool(rows) and all(row.status in ("equal", "refused") for row in rows),
        "verdict": verdict(rows),
    }


def _row_object(row: Row) -> dict[str, Any]:
    checks = {
        check.name: {
            "error": check.error if math.isfinite(check.error) else None,
            "tolerance": check.tolerance,
            "ok": check.ok,
            "where": check.where,
        }
        for check in row.checks.values()
    }
    return {
        "layout": str(row.cuts),
        "ranks": row.cuts.topology.world_size,
        "status": row.status,
        "message": row.message,
        "seconds": round(row.seconds, 2),
        "checks": checks,
    }


def _cell(check: Check) -> str:
    return f"{check.error:.1e}{'' if check.ok else '!'}"
