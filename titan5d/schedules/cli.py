"""`titan5d schedule`: draws pipeline schedules and says what they cost, before anything is trained.

    titan5d schedule --name 1F1B,ZBVZeroBubble --stages 4 --microbatches 8 --html out.html

prints the pictures in letters and a table that compares the schedules; --json prints one object instead.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from titan5d.schedules import catalog, csv, draw
from titan5d.schedules.memory import peak_activations, peak_kept_weight_grads, peak_microbatches
from titan5d.schedules.simulate import StageTimes, simulate
from titan5d.schedules.table import Schedule, ScheduleError
from titan5d.schedules.text import text_gantt
from titan5d.schedules.timeline import Timeline

_MOST_ACTIONS = 2_000_000
"""A larger table takes minutes to simulate and no picture can show it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `titan5d schedule`."""
    parser.add_argument(
        "--name", default="", help=f"one or several, with commas between: {', '.join(catalog.NAMES)}; or all"
    )
    parser.add_argument(
        "--stages", type=int, help="pipeline degree: the ranks in a row, each with --chunks stages"
    )
    parser.add_argument("--microbatches", type=int, help="micro-batches of one optimizer step")
    parser.add_argument(
        "--chunks", type=int, help="stages per rank where the schedule leaves a choice (default 2)"
    )
    parser.add_argument(
        "--csv", default="", metavar="FILE", help="read a compute-only table of torch's, as well"
    )
    times = "one number: for all of a rank's stages; or, with commas between, one per stage"
    parser.add_argument("--f", default="1", help=f"time of a forward of one micro-batch (default 1); {times}")
    parser.add_argument("--b", default="1", help="time of its input gradient (default 1), likewise")
    parser.add_argument("--w", default="1", help="time of its weight gradient (default 1), likewise")
    parser.add_argument(
        "--comm", type=float, default=0.0, help="time of a message between two ranks (default 0)"
    )
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.0,
        help="how much of the shorter one of an overlapped F and B is hidden, 0 to 1 (default 0); DualPipeV",
    )
    parser.add_argument("--html", default="", metavar="FILE", help="write a page with the pictures")
    parser.add_argument("--svg", default="", metavar="FILE", help="write the pictures alone")
    parser.add_argument(
        "--write-csv", default="", metavar="FILE", help="write the one schedule as a table of torch's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Does what the options say. Returns the exit status: 0, or 2 when something is refused."""
    try:
        timelines = _timelines(args)
        if args.write_csv and len(timelines) != 1:
            raise ScheduleError([f"--write-csv writes one schedule, and {len(timelines)} are asked for"])
        _write_files(args, timelines)
    except ScheduleError as error:
        for problem in error.problems:
            print(f"titan5d schedule: {problem}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"titan5d schedule: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"schedules": [_as_object(timeline) for timeline in timelines]}))
    else:
        print(_report(timelines))
    return 0


def _timelines(args: argparse.Namespace) -> list[Timeline]:
    """Every asked schedule, simulated. Raises ScheduleError with all that is wrong with the options."""
    schedules, problems = _schedules(args)
    numbers, bad_numbers = _numbers(args)
    problems += bad_numbers
    timelines = []
    for schedule in schedules if not bad_numbers else []:
        times, bad_counts = _stage_times(args, numbers, schedule)
        problems += bad_counts
        if not bad_counts:
            timelines.append(simulate(schedule, times))
    if problems:
        raise ScheduleError(problems)
    return timelines


def _schedules(args: argparse.Namespace) -> tuple[list[Schedule], list[str]]:
    names = (
        list(catalog.NAMES)
        if args.name == "all"
        else [name.strip() for name in args.name.split(",") if name.strip()]
    )
    schedules: list[Schedule] = []
    problems: list[str] = []
    if not names and not args.csv:
        problems.append(f"--name or --csv is needed; --name takes {', '.join(catalog.NAMES)}, or all")
    if names and (args.stages is None or args.microbatches is None):
        problems.append("--name needs --stages (ranks in the pipeline) and --microbatches as well")
        names = []
    for name in names:
        chunks = _chunks(name, args.chunks, alone=len(names) == 1)
        problem = catalog.microbatch_problem(name, args.stages, chunks, args.microbatches)
        actions = 3 * args.stages * chunks * args.microbatches
        if problem is None and actions > _MOST_ACTIONS:
            problem = f"{name} would have up to {actions:,} actions: at most {_MOST_ACTIONS:,} can be drawn"
        if problem is None:
            schedules.append(catalog.build(name, args.stages, chunks, args.microbatches))
        else:
            problems.append(problem)
    if args.csv:
        try:
            schedules.append(csv.read_csv(args.csv, args.microbatches))
        except ScheduleError as error:
            problems += error.problems
        else:
            if args.stages not in (None, schedules[-1].n_ranks):
                problems.append(
                    f"--stages is {args.stages}, but {args.csv} has {schedules[-1].n_ranks} ranks"
                )
    return schedules, problems


def _chunks(name: str, asked: int | None, alone: bool) -> int:
    """In a comparison --chunks is for the schedules that leave a choice; one alone takes it at its word."""
    fixed = name in ("GPipe", "1F1B") or name in catalog.V_SHAPED
    return catalog.default_chunks(name) if asked is None or (fixed and not alone) else asked


def _numbers(args: argparse.Namespace) -> tuple[list[list[float]], list[str]]:
    """The numbers behind --f, --b and --w, and what is wrong with the times given."""
    numbers, problems = [], []
    for option, text in (("--f", args.f), ("--b", args.b), ("--w", args.w)):
        try:
            numbers.append([float(number) for number in text.split(",")])
        except ValueError:
            problems.append(
                f"{option} is {text!r}: write a number, or numbers with commas between, like 1,1,2"
            )
            continue
        if not all(isfinite(number) and number >= 0 for number in numbers[-1]):
            problems.append(f"{option} is {text!r}: times are finite and at least 0")
    if not (isfinite(args.comm) and args.comm >= 0):
        problems.append(f"--comm is {args.comm}: a time is finite and at least 0")
    if not 0 <= args.overlap <= 1:
        problems.append(f"--overlap is {args.overlap}: it is a fraction from 0 to 1")
    return numbers, problems


def _stage_times(
    args: argparse.Namespace, numbers: list[list[float]], schedule: Schedule
) -> tuple[StageTimes, list[str]]:
    """One number is shared out over the stages of a rank; a number per stage is taken as it is."""
    share = StageTimes.even(schedule, 1.0, 1.0, 1.0).forward
    columns, problems = [], []
    for option, column in zip(("--f", "--b", "--w"), numbers, strict=True):
        if len(column) not in (1, schedule.n_stages):
            problems.append(
                f"{option} has {len(column)} times: give 1, or one for each of the "
                f"{schedule.n_stages} stages of {schedule.name}"
            )
        columns.append(tuple(column[0] * part for part in share) if len(column) == 1 else tuple(column))
    return StageTimes(columns[0], columns[1], columns[2], args.comm, args.overlap), problems


def _write_files(args: argparse.Namespace, timelines: Sequence[Timeline]) -> None:
    if args.write_csv:
        csv.write_csv(timelines[0].schedule, args.write_csv)
    if args.html:
        Path(args.html).write_text(draw.html(timelines, "Pipeline schedules"), encoding="utf-8")
    if args.svg:
        Path(args.svg).write_text(draw.svg(timelines), encoding="utf-8")


def _report(timelines: Sequence[Timeline]) -> str:
    """The pictures in letters, then one line of figures for each schedule."""
    width = max(40, shutil.get_terminal_size((160, 24)).columns - 12)
    blocks = [f"{timeline.schedule.name}\n{text_gantt(timeline, width)}\n" for timeline in timelines]
    table = [
        ("schedule", "stages", "makespan", "bubble", "idle by rank", "holds by rank", "W put off by rank")
    ]
    for timeline in timelines:
        schedule = timeline.schedule
        table.append(
            (
                schedule.name,
                str(schedule.n_stages),
                f"{timeline.makespan:.5g}",
                f"{timeline.bubble_fraction:.1%}",
                _by_rank(timeline.idle),
                _by_rank(peak_microbatches(schedule)),
                _by_rank(peak_kept_weight_grads(schedule)),
            )
        )
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    note = "holds: micro-batches whose activations a rank keeps at once (held in one of two stages = a half)"
    return "\n".join(blocks + lines + [note])


def _by_rank(values: Sequence[float]) -> str:
    """All values, rank 0 first; one if they are equal, the range if there are many."""
    texts = [f"{value:.4g}" for value in values]
    if len(set(texts)) == 1:
        return f"{texts[0]} each"
    if len(texts) > 8:
        return f"{min(values):.4g} to {max(values):.4g}"
    return " ".join(texts)


def _as_object(timeline: Timeline) -> dict[str, object]:
    """For --json. Times are in the unit of --f, --b and --w; lists are by rank."""
    schedule = timeline.schedule
    return {
        "name": schedule.name,
        "ranks": schedule.n_ranks,
        "stages": schedule.n_stages,
        "microbatches": schedule.microbatches,
        "rank_of_stage": schedule.rank_of_stage,
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "busy": timeline.busy,
        "idle": timeline.idle,
        "peak_activations": peak_activations(schedule),
        "peak_microbatches": peak_microbatches(schedule),
        "peak_kept_weight_grads": peak_kept_weight_grads(schedule),
        "actions": [[[str(span.slot), span.start, span.end] for span in row] for row in timeline.spans],
    }
