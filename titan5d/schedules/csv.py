"""Reads and writes schedules as torch.distributed.pipelining's compute-only CSV tables.

One line per rank, one cell per time slot, empty cells where a rank waits:

    0F0,0F1,0F2,,,0B0,,0B1,,0B2           stage, kind (F, B, I, W), micro-batch
    ,1F0,1F1,1B0,1F2,1B1,,1B2
    (0F4;7B1)OVERLAP_F_B                  a forward and a backward in one slot

Cells say only what comes after what: a rank never waits for an empty cell to pass, only for its inputs.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from titan5d.schedules.check import problems
from titan5d.schedules.simulate import time_slots
from titan5d.schedules.table import Action, Kind, Overlap, Schedule, ScheduleError, Slot, parts

_ACTION = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_NOT_COMPUTE = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_SHOWN = 20
"""How many problems one message lists."""


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Writes the table, one cell per time slot."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for row in time_slots(schedule):
            writer.writerow("" if slot is None else str(slot) for slot in row)


def read_csv(path: str | Path, microbatches: int | None = None, name: str | None = None) -> Schedule:
    """The schedule in a file. Ranks, stages and their places are read off the table.

    Args:
        microbatches: how many there have to be; None = the highest number in the table, plus one.
        name: what to call it; None = the name of the file.

    Raises ScheduleError listing what is wrong: cells that are no actions (by rank and cell), a stage on two
    ranks or on none, actions missing, there twice or in a wrong order, ranks that would wait for each other
    forever. Raises OSError if the file cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError([f"{path}: not a text file ({error.reason} at byte {error.start})"]) from None
    try:
        lines = list(csv.reader(text.splitlines(), strict=True))
    except csv.Error as error:
        raise ScheduleError([f"{path}: not a CSV table ({error})"]) from None
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()  # blank lines at the end are no ranks
    found: list[str] = []
    rows = [_parse_row(rank, line, found) for rank, line in enumerate(lines)]
    if not any(rows) and not found:
        found = ["the table is empty: it needs one line per rank, with cells like 0F0 or 1B2"]
    if not found:
        rank_of_stage = _rank_of_stage(rows, found)
        m = microbatches if microbatches is not None else _count_microbatches(rows, found)
    if not found:
        schedule = Schedule(name or path.name, m, rank_of_stage, tuple(tuple(row) for row in rows))
        found = problems(schedule)
    if found:
        shown = found[:_SHOWN] + ([f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])
        raise ScheduleError([f"{path}: {problem}" for problem in shown])
    return schedule


def parse_slot(text: str) -> Slot:
    """`1F0` or `(0F4;7B1)OVERLAP_F_B` as a slot. Raises ValueError saying what is wrong with `text`."""
    if match := _ACTION.fullmatch(text):
        stage, kind, microbatch = match.groups()
        return Action(int(stage), _kind(kind), int(microbatch))
    if match := _OVERLAP.fullmatch(text):
        pair = [parse_slot(part.strip()) for part in match.groups()]
        # Which of the two is written first makes no difference: they share the slot.
        pair.sort(key=lambda slot: not (isinstance(slot, Action) and slot.kind == "F"))
        first, second = pair
        if isinstance(first, Action) and isinstance(second, Action):
            return Overlap(first, second)
    if _NOT_COMPUTE.fullmatch(text):
        raise ValueError(
            f"{text!r} is no compute action: this reads compute-only tables (F, B, I, W, OVERLAP_F_B), "
            "from which messages and FSDP actions are worked out"
        )
    raise ValueError(
        f"{text!r} is no action: write stage, kind and micro-batch like 2F0, with kind F, B, I or W, "
        "or (0F4;7B1)OVERLAP_F_B"
    )


def _kind(text: str) -> Kind:
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    return kinds[text]


def _parse_row(rank: int, cells: list[str], found: list[str]) -> list[Slot]:
    row = []
    for index, cell in enumerate(cells):
        if cell.strip():
            try:
                row.append(parse_slot(cell.strip()))
            except ValueError as error:
                found.append(f"rank {rank} (line {rank + 1}), cell {index + 1}: {error}")
    return row


def _rank_of_stage(rows: list[list[Slot]], found: list[str]) -> tuple[int, ...]:
    """Each stage's rank: the one whose line has it. Adds to `found` stages on several ranks or on none."""
    holders: dict[int, set[int]] = {}
    for rank, row in enumerate(rows):
        if not row:
            found.append(f"rank {rank} (line {rank + 1}) is empty: every rank needs actions")
        for slot in row:
            for action in parts(slot):
                holders.setdefault(action.stage, set()).add(rank)
    for stage, ranks in sorted(holders.items()):
        if len(ranks) > 1:
            where = " and ".join(f"rank {rank}" for rank in sorted(ranks))
            found.append(f"stage {stage} is on {where}: a stage is on one rank")
    n_stages = max(holders) + 1
    found += _gaps("stage", n_stages, set(holders))
    return tuple(min(holders.get(stage, {0})) for stage in range(n_stages))


def _count_microbatches(rows: list[list[Slot]], found: list[str]) -> int:
    """The highest micro-batch plus one. Adds to `found` the numbers below it that appear nowhere."""
    seen = {action.microbatch for row in rows for slot in row for action in parts(slot)}
    found += _gaps("micro-batch", max(seen) + 1, seen)
    return max(seen) + 1


def _gaps(what: str, n: int, seen: set[int]) -> list[str]:
    missing = [number for number in range(n) if number not in seen]
    if not missing:
        return []
    shown = ", ".join(str(number) for number in missing[:6])
    more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
    return [f"the highest {what} is {n - 1}, but no rank has actions of {what} {shown}{more}"]
