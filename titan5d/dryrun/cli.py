"""`titan5d dryrun`: one step of a run on a world of any size, without devices and without memory.

    titan5d dryrun --config llama70b --world 256
    titan5d dryrun --config deepseek_v3_671b --world 2048 --all-kinds --imbalance 1.5 --training.global_batch_size 2048

The trainer's own code runs, on tensors that have sizes only and in a process group of which this process is one rank.
Out come the memory of the rank by purpose, what it sends along each axis and the FLOPs it computes; and the error, with
the rank and the part of the model, if the step would fail.

Any --section.key value of `titan5d train` may follow. Exit status: 0 the step runs, 2 the config is refused, 1 the step
fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from titan5d.config.check import Layout, check, device_problems, leaves_zero_stage_open
from titan5d.config.load import ConfigError, load_config
from titan5d.config.schema import Config
from titan5d.dryrun.kinds import RankKind, kind_of, rank_kinds
from titan5d.dryrun.report import as_dict, as_text, notes
from titan5d.dryrun.trace import Assumed, RankTrace, TraceError, trace_rank
from titan5d.models.args import ModelArgs
from titan5d.models.families import model_args

RANKS_PER_NODE = 8


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options, rest = _parser().parse_known_args(argv)
    remarks: list[str] = []
    try:
        asked = load_config(rest, remarks)
        device = options.device or ("cpu" if asked.training.device == "cpu" else "cuda")
        args = model_args(asked.model, asked.moe, asked.debug.moe_force_load_balance)
        if options.world < 1:
            raise ConfigError([f"--world {options.world}: a run has at least 1 rank"])
        layout = check(asked, args, options.world)
        problems = device_problems(asked, layout.topology, device, min(RANKS_PER_NODE, options.world))
        problems += _option_problems(options, asked, layout, args.n_experts > 0)
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    config = traceable(asked)
    assumed = Assumed(options.documents, options.imbalance)
    if leaves_zero_stage_open(asked, layout.topology):
        remarks.append(f"zero_stage is open: a run takes the least that fits, here it is {layout.zero_stage}")
    kinds = rank_kinds(layout)
    if not options.all_kinds:
        others = len(kinds) - 1
        kinds = [kind_of(layout, options.rank)]
        if others:
            remarks.append(f"{others} other kinds of ranks do other work: --all-kinds traces one of each")
    try:
        traces = trace_ranks(config, args, layout, kinds, assumed)
    except TraceError as error:
        print(_error_text(error, options.json), file=sys.stdout if options.json else sys.stderr)
        return 1
    remarks += notes(config, layout, assumed, device, asked)
    if options.json:
        print(json.dumps(as_dict(layout, traces, remarks), indent=2))
    else:
        print(as_text(layout, traces, remarks))
    return 0


def trace_ranks(
    config: Config, args: ModelArgs, layout: Layout, kinds: Sequence[RankKind], assumed: Assumed
) -> list[RankTrace]:
    """One rank after the other. Raises TraceError at the first that fails."""
    return [trace_rank(config, args, layout, kind, assumed) for kind in kinds]


def traceable(config: Config) -> Config:
    """The same run without what needs a compiler or CUDA and changes no size."""
    return replace(
        config,
        compile=replace(config.compile, enable=False),
        parallelism=replace(config.parallelism, enable_async_tensor_parallel=False),
    )


def _option_problems(
    options: argparse.Namespace, config: Config, layout: Layout, has_experts: bool
) -> list[str]:
    problems = []
    if not 0 <= options.rank < options.world:
        problems.append(
            f"--rank {options.rank}: the ranks of --world {options.world} are 0..{options.world - 1}"
        )
    if options.imbalance < 1:
        problems.append(
            f"--imbalance {options.imbalance:g}: load of the fullest rank, 1 = its even share, or more"
        )
    if options.imbalance > 1 and not has_experts:
        problems.append(f"--imbalance {options.imbalance:g}: the model has no experts; leave it out")
    elif options.imbalance > layout.topology.ep:
        problems.append(
            f"--imbalance {options.imbalance:g}: a rank has at most all rows, {layout.topology.ep} x its even share"
            f" with expert_parallel_degree = {layout.topology.ep}"
        )
    if not 1 <= options.documents <= config.training.seq_len:
        problems.append(
            f"--documents {options.documents}: a row of training.seq_len = {config.training.seq_len} tokens holds"
            f" 1..{config.training.seq_len} documents"
        )
    if options.documents > 1 and not config.training.document_mask:
        problems.append(
            f"--documents {options.documents} with training.document_mask = false: attention sees whole rows anyway;"
            " leave it out"
        )
    return problems


def _error_text(error: TraceError, as_json: bool) -> str:
    if not as_json:
        return str(error)
    found = {
        "rank": error.kind.rank,
        "kind": error.kind.name,
        "moment": str(error.moment),
        "error": f"{type(error.error).__name__}: {error.error}",
        "line": error.line,
    }
    return json.dumps({"error": found}, indent=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan5d dryrun",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--world", type=int, required=True, help="ranks of the run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, default=0, help="the rank to trace (default 0)")
    which.add_argument(
        "--all-kinds", action="store_true", help="trace a first, a middle and a last pipeline stage"
    )
    parser.add_argument("--json", action="store_true", help="one object instead of tables; bytes and FLOPs")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="what the run is on (default: training.device, auto = cuda)"
    )
    parser.add_argument(
        "--documents", type=int, default=1, help="documents of equal length in each row (default 1)"
    )
    parser.add_argument(
        "--imbalance", type=float, default=1.0, help="load of the rank's experts, 1 = even (default 1)"
    )
    return parser
