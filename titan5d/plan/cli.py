"""`titan5d plan`: will this config fit, how fast will it be, and which cut should change? Without a cluster, or torch.

    titan5d plan --config llama70b --gpus 256 --gpu h100-80g [--section.key value ...] [--json] [--html report.html]
    titan5d plan --model 70B --gpus 64 --gpu h100-80g --seq 8192 --global-batch 1024 --search [--write best.toml]

Exit status: 0 it fits; 1 it does not; 2 a run would refuse the config, or the question makes no sense.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan5d.config.load import ConfigError, find_config, load_config, parse_flags, validate
from titan5d.config.schema import Config
from titan5d.hardware import device_names, find_device
from titan5d.models.families import FAMILIES, model_args
from titan5d.plan.advice import changes_that_fit
from titan5d.plan.assumptions import assumptions_of
from titan5d.plan.explain import ranking, search_text, why
from titan5d.plan.html import page
from titan5d.plan.layouts import Priors
from titan5d.plan.network import Network
from titan5d.plan.plan_run import plan_run
from titan5d.plan.predict import Machine
from titan5d.plan.quantities import parse_bandwidth
from titan5d.plan.report import as_object, text
from titan5d.plan.search import SearchResult, final_config, search
from titan5d.plan.stated import stated_hardware
from titan5d.plan.write_toml import layout_toml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `titan5d plan`. Everything else is a flag of the config, --section.key value."""
    what = parser.add_argument_group("what is planned")
    what.add_argument("--config", metavar="NAME|FILE", help="a TOML, as `titan5d train` takes it")
    what.add_argument(
        "--model", metavar="FLAVOR", help="instead: a flavor such as 70B; needs --seq, --global-batch"
    )
    what.add_argument("--family", help=f"family of the flavor: {', '.join(FAMILIES)}")
    what.add_argument("--seq", type=int, help="tokens of a row, training.seq_len")
    what.add_argument("--global-batch", type=int, help="rows of a step, training.global_batch_size")
    on = parser.add_argument_group("on what (default: the `# Hardware: N x GPU` line of the config)")
    on.add_argument("--gpus", type=int, help="how many")
    on.add_argument("--gpu", help=f"which: {', '.join(device_names())}")
    on.add_argument(
        "--nodes-of", type=int, metavar="N", help="GPUs of a node that fast links join (default: the GPU's)"
    )
    on.add_argument("--intra", metavar="RATE", help="bandwidth of a GPU inside a node, such as 450GB/s")
    on.add_argument(
        "--inter", metavar="RATE", help="bandwidth of a GPU between nodes, such as 50GB/s or 400Gb/s"
    )
    on.add_argument(
        "--assume", action="append", default=[], metavar="NAME=NUMBER", help="change an assumption"
    )
    out = parser.add_argument_group("the answer")
    out.add_argument("--json", action="store_true", help="one object instead of text")
    out.add_argument("--html", metavar="FILE", help="also a page with pictures")
    look = parser.add_argument_group("search")
    look.add_argument(
        "--search", action="store_true", help="look for the fastest layout instead of planning the config's"
    )
    look.add_argument("--top", type=int, default=10, help="how many are shown (default 10)")
    look.add_argument("--write", metavar="FILE", help="the fastest as a TOML for `titan5d train`")
    look.add_argument("--max-tp", type=int, help="tensor ranks at most (default: a node's)")
    look.add_argument(
        "--cp-from", type=int, default=Priors.cp_from, help="tokens of a row from which contexts are cut"
    )
    look.add_argument(
        "--pp-from", type=float, default=Priors.pp_from, help="parameters from which pipelines are tried"
    )
    look.add_argument("--max-pp", type=int, default=Priors.max_pp, help="pipeline ranks at most")
    look.add_argument("--max-etp", type=int, default=Priors.max_etp, help="slices of an expert at most")
    look.add_argument(
        "--hsdp-nodes", default="2-8", metavar="A-B", help="on how many nodes replicas are tried"
    )
    look.add_argument(
        "--any-zero", action="store_true", help="try higher ZeRO stages where a lower one fits too"
    )
    look.add_argument("--fill", type=float, default=Priors.fill, help="share of the memory a layout may need")


SEARCH_ONLY = (
    *("--top", "--write", "--max-tp", "--cp-from", "--pp-from", "--max-pp", "--max-etp", "--hsdp-nodes"),
    *("--any-zero", "--fill"),
)


def _set(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """The options that were given another value than their default."""
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    return ["--" + name.replace("_", "-") for name in given]


def main(argv: Sequence[str]) -> int:
    """Plans as the words say; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="titan5d plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    args, flags = parser.parse_known_args(list(argv))
    try:
        notes: list[str] = []
        config, title = _config(args, flags, notes)
        machine = _machine(args, config)
        if args.search:
            return _search(args, config, machine, title)
        if unused := [flag for flag in _set(parser, args) if flag in SEARCH_ONLY]:
            raise ConfigError([f"{flag} belongs to --search" for flag in unused])
        prediction, more = plan_run(config, machine)
        advice = [] if prediction.fits else changes_that_fit(config, machine, prediction)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    notes += more
    if args.json:
        print(json.dumps(as_object(prediction, notes, advice)))
    else:
        print(text(prediction, notes, advice, title))
    status = 0 if prediction.fits else 1
    return _write(args.html, page(prediction, notes, advice, f"Plan of {title}")) or status


def _search(args: argparse.Namespace, config: Config, machine: Machine, title: str) -> int:
    priors = _priors(args, machine)
    start = time.perf_counter()
    result = search(config, machine, priors, args.top)
    seconds = time.perf_counter() - start
    said = search_text(result, machine, priors, seconds)
    if not result.best:
        print(json.dumps(_search_object(result, machine, None)) if args.json else said)
        return 1
    sizes = model_args(config.model, config.moe, config.debug.moe_force_load_balance)
    best = final_config(config, result.best[0][0], sizes)
    prediction, notes = plan_run(best, machine)
    if args.json:
        print(json.dumps(_search_object(result, machine, as_object(prediction, notes, []))))
    else:
        print(said)
        print("\n" + text(prediction, notes, [], f"the first, {title}"))
    status = 0
    if args.write:
        status = _write(args.write, layout_toml(best, prediction, title))
    return _write(args.html, page(prediction, notes, [], f"Search: {title}", ranking(result))) or status


def _search_object(result: SearchResult, machine: Machine, best: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "ranking": [
            {
                "layout": str(layout),
                "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
                "mfu": found.mfu,
                "step_time": found.time.total,
                "memory": found.fullest.total,
            }
            for layout, found in result.best
        ],
        "why": why(result, machine) if result.best else [],
        "tried": result.tried,
        "rejected": dict(result.rejected),
        "best": best,
    }


def _config(args: argparse.Namespace, flags: list[str], notes: list[str]) -> tuple[Config, str]:
    """(the config, a title). Raises ConfigError."""
    if args.model is None:
        if args.family:
            raise ConfigError(["--family belongs to --model"])
        if args.config is None:
            raise ConfigError(["--config NAME|FILE or --model FLAVOR is needed: what shall be planned?"])
        words = ["--config", args.config, *flags]
        words += [] if args.seq is None else ["--training.seq_len", str(args.seq)]
        words += [] if args.global_batch is None else ["--training.global_batch_size", str(args.global_batch)]
        config = load_config(words, notes)
        return config, Path(str(config.job.config_file)).stem
    if args.config is not None:
        raise ConfigError(["--config and --model both say what is planned; keep one of them"])
    if args.seq is None or args.global_batch is None:
        raise ConfigError(["--model needs --seq (tokens of a row) and --global-batch (rows of a step)"])
    family = _family(args.model, args.family)
    table: dict[str, Any] = {
        "model": {"name": family, "flavor": args.model},
        "training": {"seq_len": args.seq, "global_batch_size": args.global_batch, "local_batch_size": 1},
        "compile": {"enable": True},
    }
    for keys, value in parse_flags(flags)[1]:
        section = table
        for key in keys[:-1]:
            section = section.setdefault(key, {})
        section[keys[-1]] = value
    return validate(table), f"{family} {args.model}"


def _family(flavor: str, family: str | None) -> str:
    """The one family that has the flavor. Raises ConfigError."""
    having = [name for name, module in FAMILIES.items() if flavor in module.FLAVORS]
    if family is not None:
        return family  # the model's own check names its flavors
    if len(having) == 1:
        return having[0]
    if having:
        raise ConfigError(
            [f"--model {flavor}: {' and '.join(having)} have this flavor; say which with --family"]
        )
    known = sorted({name for module in FAMILIES.values() for name in module.FLAVORS})
    raise ConfigError(
        [
            f"--model {flavor}: no family has this flavor{_similar(flavor, known)}; there are {', '.join(known)}"
        ]
    )


def _machine(args: argparse.Namespace, config: Config) -> Machine:
    """Raises ConfigError."""
    problems: list[str] = []
    stated = stated_hardware(find_config(args.config)) if args.config else None
    gpus = args.gpus if args.gpus is not None else stated and stated[0]
    name = args.gpu if args.gpu is not None else stated and stated[1]
    if gpus is None or name is None:
        raise ConfigError(
            ["--gpus N and --gpu NAME are needed, or a line `# Hardware: N x NAME` in the config"]
        )
    if gpus < 1:
        problems.append(f"--gpus {gpus}: at least 1")
    device = find_device(name)
    if device is None:
        problems.append(
            f"--gpu {name} is not known{_similar_gpu(name)}; known are {', '.join(device_names())}"
        )
    if args.nodes_of is not None and args.nodes_of < 1:
        problems.append(f"--nodes-of {args.nodes_of}: a node has at least 1 GPU")
    rates: dict[str, float | None] = {}
    for flag in ("intra", "inter"):
        written = getattr(args, flag)
        try:
            rates[flag] = None if written is None else parse_bandwidth(written)
        except ValueError as error:
            problems.append(f"--{flag}: {error}")
    if device is None or problems:
        raise ConfigError(problems)
    try:
        assumptions = assumptions_of(device).with_values(args.assume)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    network = Network.of(device, assumptions, args.nodes_of, rates["intra"], rates["inter"])
    return Machine(device, gpus, network, assumptions)


def _priors(args: argparse.Namespace, machine: Machine) -> Priors:
    problems = []
    first, dash, last = args.hsdp_nodes.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        problems.append(f"--hsdp-nodes {args.hsdp_nodes}: write the least and the most, such as 2-8")
    if not 0 < args.fill <= 1:
        problems.append(f"--fill {args.fill:g}: a share of the memory, above 0 and at most 1")
    if args.top < 1:
        problems.append(f"--top {args.top}: at least 1")
    if problems:
        raise ConfigError(problems)
    return Priors(
        max_tp=args.max_tp or machine.network.per_node,
        cp_from=args.cp_from,
        pp_from=args.pp_from,
        max_pp=args.max_pp,
        max_etp=args.max_etp,
        hsdp_nodes=(int(first), int(last)),
        least_zero=not args.any_zero,
        fill=args.fill,
    )


def _similar(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word.lower(), [one.lower() for one in known], n=1, cutoff=0.4)
    return f"; did you mean {known[[one.lower() for one in known].index(close[0])]}?" if close else ""


def _similar_gpu(name: str) -> str:
    """Of `H100 SXM` and `h100` all that are an h100; of other words the closest."""
    chip = name.lower().replace("nvidia", "").split()
    alike = [one for one in device_names() if chip and one.split("-")[0] == chip[0].split("-")[0]]
    return f"; did you mean {' or '.join(alike)}?" if alike else _similar(name, device_names())


def _write(path: str | None, content: str) -> int:
    """Writes a file if one is asked for; returns the exit status."""
    if path is None:
        return 0
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        print(f"titan5d plan: {path}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"wrote {path}", file=sys.stderr)
    return 0
