"""What run_train.sh does once it has a Python: checks the run, starts its ranks of this node with torchrun, waits.

    python -m titan5d.launch.torchrun_ranks [--config NAME|FILE] [--section.key value ...]

    run_train.sh = this process        config checked here, without torch: refusals within a second
      torchrun                         (its session is its own: Ctrl-C reaches it through this process only)
        rank 0 .. NGPU-1               python -m titan5d train ARGS

Environment: NGPU (ranks on this node), DEVICE (cpu or cuda), and for several nodes or restarts what nodes.py reads.
A signal to this process is passed on (supervise.py), and its exit status is that of the ranks (exit_status.py).
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from titan5d.hardware import GIB
from titan5d.launch import exit_status
from titan5d.launch.devices import count_cores, count_gpus, torch_build
from titan5d.launch.failure import ALONE
from titan5d.launch.nodes import (
    Nodes,
    Refused,
    check_port,
    integer,
    raise_if,
    read_nodes,
    rendezvous_environment,
    torchrun,
)
from titan5d.launch.supervise import supervise

if TYPE_CHECKING:
    from titan5d.config.check import Layout
    from titan5d.config.schema import Config, Parallelism
    from titan5d.models.args import ModelArgs

NEEDED = ("torch", "numpy", "pydantic", "tomli_w", "tokenizers", "safetensors", "tensorboard")
OLDEST_TORCH = (2, 11)
DEFAULT_CPU_RANKS = 2
CPU_RANK_MEMORY = 0.25 * GIB
"""What a rank on the CPU takes before it holds any model: torch itself."""


@dataclass(frozen=True)
class Run:
    """What is started on this node.

    Attributes:
        arguments: of `titan5d train`.
        ranks: how many.
        device: cpu or cuda.
        init_timeout: seconds for the ranks to find each other (comm.init_timeout_seconds).
    """

    arguments: list[str]
    ranks: int
    device: str
    init_timeout: float


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        os.execv(sys.executable, [sys.executable, "-m", "titan5d", "train", *argv])
    try:
        check_python()
        nodes = read_nodes(os.environ)
        run = prepare(argv, os.environ, nodes)
        check_port(nodes)
        if nodes.count > 1:  # known now; node 0 may be gone when ranks are started again
            nodes = replace(nodes, local_address=nodes.own_address())
    except Refused as refused:
        print(refused, file=sys.stderr)
        return exit_status.REFUSED

    def command(restarts_left: int) -> list[str]:
        launcher = torchrun(nodes, run.ranks, run.init_timeout, restarts_left)
        return [*launcher, "-m", "titan5d", "train", *run.arguments]

    environ = {**rank_environment(os.environ, run), **rendezvous_environment(os.environ, nodes)}
    node = ""
    if nodes.count > 1:
        node = f" of node {nodes.rank} of {nodes.count}, gloo on {environ.get('GLOO_SOCKET_IFNAME', 'any network')}"
    place = "GPUs" if run.device == "cuda" else f"CPU with OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}"
    print(f"titan5d: ranks on the {place}{node}: {run.ranks} (NGPU=n starts n)", file=sys.stderr)
    waiting = nodes.waiting if nodes.count > 1 else None
    name = f"node {nodes.rank} of {nodes.count} ({socket.gethostname()})" if nodes.count > 1 else ALONE
    meets = nodes.meets if nodes.may_join_again else None
    return supervise(command, environ, run.ranks, waiting, run.init_timeout, name, nodes.restarts, meets)


def check_python() -> None:
    """Raises Refused when this Python cannot run titan5d; only one that the user brought along can be so."""
    if sys.version_info < (3, 11):  # noqa: UP036  a Python that the user brought along
        raise Refused(f"refused: {sys.executable} is Python {sys.version.split()[0]}, titan5d needs 3.11 or newer")
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        raise Refused(
            f"refused: {sys.executable} has no {', '.join(missing)}; run\n"
            f"    {sys.executable} -m pip install -c constraints.txt -e .\n"
            "in the repository, or unset TITAN5D_PYTHON to let the script make an environment of its own"
        )
    version, _ = torch_build()
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        raise Refused(
            f"refused: {sys.executable} has torch {version}, titan5d needs {'.'.join(map(str, OLDEST_TORCH))} or newer"
        )


def prepare(argv: Sequence[str], environ: Mapping[str, str], nodes: Nodes) -> Run:
    """Reads and checks the config for the ranks it will get. Raises Refused with everything that is wrong."""
    from titan5d.config.load import ConfigError, load_config
    from titan5d.models.families import model_args

    problems: list[str] = []
    wanted = environ.get("DEVICE")
    if wanted not in (None, "", "cpu", "cuda"):
        problems.append(f"DEVICE={wanted} must be cpu or cuda")
    asked = integer(environ, "NGPU", None, problems)
    if asked is not None and asked < 1:
        problems.append(f"NGPU={asked} must be at least 1: it is the number of ranks on this node, also on the CPU")
    raise_if(problems)

    # In front, so that a flag of the user's own wins
    arguments = [*(["--training.device", wanted] if wanted else []), *argv]
    try:
        config = load_config(arguments)
        present = count_gpus(environ)
        gpus = present if torch_build()[1] else 0
        device = config.training.device
        if device == "cuda" and gpus == 0:
            why = f"torch {torch_build()[0]} is a build without them" if present else "there is none here"
            raise Refused(f"refused: training.device = 'cuda' needs a GPU, but {why}; use 'cpu' or 'auto'")
        if device == "auto":
            device = "cuda" if gpus else "cpu"
        ranks = asked or ranks_on_a_node(config.parallelism, device, gpus, nodes.counts[0])
        if device == "cuda" and ranks > gpus:
            raise Refused(f"refused: NGPU={ranks} ranks, but there are {gpus} GPUs here; a GPU holds one rank")
        args = model_args(config.model, config.moe, config.debug.moe_force_load_balance)
        layout = check_every_count(config, args, ranks, nodes)
        if device == "cpu":  # with GPUs each rank asks its own
            from titan5d.hardware import host_memory_limit
            from titan5d.plan.fits import memory_problems

            misfits = memory_problems(config, args, layout, device, ranks) + too_many(ranks, host_memory_limit())
            if misfits:
                raise ConfigError(misfits)
    except ConfigError as error:
        raise Refused(str(error)) from None
    return Run(arguments, ranks, device, config.comm.init_timeout_seconds)


def check_every_count(config: Config, args: ModelArgs, ranks: int, nodes: Nodes) -> Layout:
    """The layout on the fewest nodes the run may have. Raises ConfigError unless it works on every number of them."""
    from titan5d.config.check import check
    from titan5d.config.load import ConfigError

    if len(nodes.counts) == 1:
        return check(config, args, ranks * nodes.count)
    layouts, problems = {}, {}
    for count in nodes.counts:
        try:
            layouts[count] = check(config, args, ranks * count)
        except ConfigError as error:
            problems[count] = error.problems
    if not problems:
        return layouts[nodes.counts[0]]
    works = ", ".join(map(str, layouts)) or "none"
    raise ConfigError(
        [
            f"NNODES={nodes.counts[0]}:{nodes.count} lets the run go on with {count} nodes of {ranks} ranks, but"
            f" {problem} (numbers of nodes that work: {works})"
            for count, problems_of_count in problems.items()
            for problem in problems_of_count
        ]
    )


def ranks_on_a_node(parallelism: Parallelism, device: str, gpus: int, nodes: int) -> int:
    """How many ranks to start here when the user does not say: what the degrees ask for, else all GPUs or 2 on CPU.

    Degrees that do not fit get the number nearest to them; the check that follows refuses them with the numbers.
    """
    shard = parallelism.data_parallel_shard_degree
    degrees = (
        parallelism.data_parallel_replicate_degree,
        parallelism.context_parallel_degree,
        parallelism.tensor_parallel_degree,
        parallelism.pipeline_parallel_degree,
    )
    product = max(shard, 1)
    for degree in degrees:
        product *= max(degree, 1)
    here = -(-product // nodes)  # rounded up
    if device == "cuda":
        return min(here, gpus) if shard >= 1 else gpus
    return here if shard >= 1 else max(here, DEFAULT_CPU_RANKS)


def too_many(ranks: int, memory: float) -> list[str]:
    """One sentence when so many ranks do not fit into `memory` bytes even without a model, else nothing."""
    need = ranks * CPU_RANK_MEMORY
    if need <= memory:
        return []
    return [
        f"{ranks} CPU ranks take at least {need / GIB:.1f} GiB before they hold any model, this machine has"
        f" {memory / GIB:.1f} GiB; set NGPU or smaller parallelism.*_degree, or spread them over machines (NNODES)"
    ]


def rank_environment(environ: Mapping[str, str], run: Run) -> dict[str, str]:
    """The environment of the ranks: an equal share of the cores, and on the CPU no threads that spin while waiting."""
    defaults = {"OMP_NUM_THREADS": str(max(1, count_cores() // run.ranks))}
    if run.device == "cpu":
        defaults |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    return {**defaults, **environ}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
