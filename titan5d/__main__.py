"""`titan5d COMMAND ...` or `python -m titan5d COMMAND ...`. Each command imports only what it needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

USAGE = """usage: titan5d COMMAND [arguments]

  train      train a model: --config NAME|FILE [--section.key value ...]; --help [SECTION] lists every key
  data       `data build` tokenizes text into shards, `data info` describes them
  checkpoint ls, inspect, verify: look at checkpoints and check them
  convert    to-hf, from-hf: checkpoints to and from Hugging Face's format
  plan       will it fit, how fast will it be, which layout is best: --config NAME --gpus N --gpu NAME; --search
  dryrun     run one step of a world of any size without devices: --config NAME|FILE --world N [--rank R|--all-kinds]
  schedule   draw, simulate and compare pipeline schedules
  verify     prove that a config's cuts train the model of one process: --config NAME|FILE [--layouts LIST]
  diagnose   say why a run hung or failed, from the records in its folder: RUN_FOLDER [--json]

Start several ranks with ./run_train.sh or torchrun; exit status 0 done, 2 refused, 3 stopped by a signal, 1 else."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status of the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command == "train":
        if "--help" in rest or "-h" in rest:
            from titan5d.config.help import config_help

            asked = rest[[word in ("-h", "--help") for word in rest].index(True) + 1 :][:1]
            print(config_help(asked[0] if asked and not asked[0].startswith("-") else None))
            return 0
        from titan5d.launch.run import train

        return train(rest)
    if command == "data":
        from titan5d.data import cli as data_cli

        return _run("data", data_cli, rest)
    if command == "schedule":
        from titan5d.schedules import cli as schedule_cli

        return _run("schedule", schedule_cli, rest)
    if command == "plan":
        from titan5d.plan.cli import main as plan

        return _printed(plan, rest)
    if command == "dryrun":
        from titan5d.dryrun.cli import main as dryrun

        return _printed(dryrun, rest)
    if command == "verify":
        from titan5d.verify.cli import main as verify

        return verify(rest)
    if command == "diagnose":
        from titan5d.launch.diagnose import main as diagnose

        return diagnose(rest)
    if command in ("checkpoint", "convert"):
        from titan5d.checkpoint import cli as checkpoint_cli

        parser = argparse.ArgumentParser(
            prog=f"titan5d {command}",
            description=checkpoint_cli.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command == "checkpoint":
            checkpoint_cli.add_checkpoint_arguments(parser)
            return checkpoint_cli.run_checkpoint(parser.parse_args(rest))
        checkpoint_cli.add_convert_arguments(parser)
        return checkpoint_cli.run_convert(parser.parse_args(rest))
    print(f"titan5d: there is no command {command!r}\n\n{USAGE}", file=sys.stderr)
    return 2


def _printed(command: Callable[[Sequence[str]], int], words: list[str]) -> int:
    """Runs a command that prints a lot, and ends quietly when nobody reads on, as behind `| head`."""
    try:
        status = command(words)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written at exit
        return 1
    return status


def _run(command: str, module: ModuleType, words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"titan5d {command}", description=module.__doc__)
    module.add_arguments(parser)
    return module.run(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
