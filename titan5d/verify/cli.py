"""`titan5d verify`: proves that the cuts of a config train the same model as one process, on this machine's CPU.

    titan5d verify --config llama70b                             its own layout, with 2 ranks where it has more
    titan5d verify --config X.toml --layouts "dp2tp2, pp2cp2"    these
    titan5d verify --all-pairs                                   every cut alone and every two together
    titan5d verify --world 8 --json                              every layout of 8 ranks

The model, the batch and the degrees are made small, and what was changed is said; everything else is executed as the
config says, and --section.key value changes it as in `titan5d train`. Exit status: 0 equal, 1 not, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from titan5d.config.load import QUICKSTART, ConfigError, load_config
from titan5d.launch.exit_status import FAILED, REFUSED
from titan5d.verify.layouts import GRAMMAR, Cuts, LayoutError, all_pairs, of_world, parse_layouts


def parser() -> argparse.ArgumentParser:
    """The options of `titan5d verify`; others are keys of the config."""
    found = argparse.ArgumentParser(
        prog="titan5d verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--config", default=QUICKSTART, metavar="NAME|FILE", help=f"default: {QUICKSTART}")
    which = found.add_mutually_exclusive_group()
    which.add_argument("--layouts", metavar="LIST", help=GRAMMAR)
    which.add_argument("--all-pairs", action="store_true", help="every cut alone and every two together")
    which.add_argument("--world", type=int, metavar="N", help="every layout of N ranks that is legal")
    found.add_argument("--html", metavar="FILE", help="write the report as a page")
    found.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    found.add_argument(
        "--time-limit", type=float, default=120.0, metavar="SECONDS", help="of one layout (default 120)"
    )
    found.add_argument(
        "--composition",
        metavar="FILE",
        help="write the page of what composes with what (minutes), and nothing else",
    )
    return found


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    args, flags = parser().parse_known_args(list(words))
    try:
        if args.time_limit <= 0:
            raise LayoutError(f"--time-limit {args.time_limit:g}: seconds, more than 0")
        if args.composition:
            return _write_composition(args, flags)
        return _verify(args, flags)
    except ConfigError as error:
        print(error, file=sys.stderr)
    except LayoutError as error:
        print(f"refused: {error}", file=sys.stderr)
    except OSError as error:
        print(f"titan5d verify: {error.filename}: {error.strerror}", file=sys.stderr)
    return REFUSED


def _verify(args: argparse.Namespace, flags: list[str]) -> int:
    config = load_config(["--config", args.config, *flags])
    # torch only now: what is refused so far needs none of it
    import torch

    from titan5d.launch.local_ranks import RankFailed
    from titan5d.verify import html, report, run
    from titan5d.verify.case import case_of
    from titan5d.verify.shrink import arguments, shrink

    torch.set_num_threads(1)  # a process that has computed with several threads must not fork
    asked = _asked(args, arguments(config).n_experts)
    small = shrink(config, asked)
    if args.world is not None:
        asked = _legal(asked or [], lambda cuts: case_of(small, cuts))
        small = shrink(config, asked)
    if args.html:
        Path(args.html).touch()  # before minutes are spent
    name = Path(config.job.config_file or args.config).name

    def say(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    say(f"titan5d verify {name}: a small case of the same kind, fp32, on CPU ranks")
    for note in small.notes:
        say(f"  - {note}")
    try:
        expected = run.run_reference(small, args.time_limit)
    except RankFailed as failed:
        print(f"titan5d verify: the reference on one process failed: {failed}", file=sys.stderr)
        return FAILED
    losses = ", ".join(f"{line['loss']:.6f}" for line in expected.metrics)
    say(f"reference: one process, loss {losses}\n\nlargest relative errors of all ranks and steps:")
    table = report.Table(small.layouts, expected, small.config.compile.enable)
    say(table.head())
    rows = []
    for row in run.run_layouts(small, expected, args.time_limit):
        rows.append(row)
        say(table.line(row))
    say(f"\n{report.verdict(rows)}")
    if args.json:
        print(json.dumps(report.as_object(name, small, expected, rows)))
    if args.html:
        Path(args.html).write_text(html.page(name, small, expected, rows), encoding="utf-8")
    status = run.exit_status(rows)
    if status == REFUSED:
        print(f"refused: {report.verdict(rows)}", file=sys.stderr)
    return status


def _asked(args: argparse.Namespace, n_experts: int) -> list[Cuts] | None:
    """The layouts of the command line; None = the config's own."""
    if args.layouts is not None:
        return parse_layouts(args.layouts)
    if args.all_pairs:
        return all_pairs(has_experts=n_experts > 0)
    return None if args.world is None else of_world(args.world, n_experts)


def _legal(layouts: Sequence[Cuts], case_of: Callable[[Cuts], object]) -> list[Cuts]:
    """Those that config/check.py lets pass. Raises ConfigError when there are none."""
    legal, problems = [], []
    for cuts in layouts:
        try:
            case_of(cuts)
        except ConfigError as error:
            problems.append(f"{cuts}: {'; '.join(error.problems)}")
        else:
            legal.append(cuts)
    if not legal:
        raise ConfigError(problems)
    return legal


def _write_composition(args: argparse.Namespace, flags: list[str]) -> int:
    if flags:
        raise ConfigError([f"--composition is made from configs of its own; leave out {' '.join(flags)}"])
    import torch

    from titan5d.verify.composition import measured_page

    torch.set_num_threads(1)
    path = Path(args.composition)
    path.touch()
    text, status = measured_page(args.time_limit, lambda line: print(line, file=sys.stderr, flush=True))
    path.write_text(text, encoding="utf-8")
    return status
