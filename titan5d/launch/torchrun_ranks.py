"""What run_train.sh does once it has a Python: checks the run, starts its ranks of this node with torchrun, waits.

    python -m titan5d.launch.torchrun_ranks [--config NAME|FILE] [--section.key value ...]

    run_train.sh = this process        config checked here, without torch: refusals within a second
      torchrun                         (its session is its own: Ctrl-C reaches it through this process only)
        rank 0 .. NGPU-1               python -m titan5d train ARGS

Environment: NGPU (ranks on this node), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, DEVICE (cpu or cuda).
A signal to this process is passed on (supervise.py), and its exit status is that of the ranks (exit_status.py).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from titan5d.launch import exit_status
from titan5d.launch.devices import count_cores, count_gpus, torch_build
from titan5d.launch.supervise import supervise

if TYPE_CHECKING:
    from titan5d.config.schema import Parallelism

NEEDED = ("torch", "numpy", "pydantic", "tomli_w", "tokenizers", "safetensors", "tensorboard")
OLDEST_TORCH = (2, 11)
DEFAULT_PORT = 29500
DEFAULT_CPU_RANKS = 2
GIB = 2**30
CPU_RANK_MEMORY = 0.25 * GIB
"""What a rank on the CPU takes before it holds any model: torch itself."""


class Refused(Exception):
    """The run cannot work as it is asked for; the text says why and what would. Exit status 2."""


@dataclass(frozen=True)
class Nodes:
    """Which node of how many this is, and where they meet."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int | None = None
    """None: torchrun takes a free one, so that runs side by side do not collide. One node only."""

    def waiting(self) -> str | None:
        """What to say while the other nodes have not come."""
        if self.count == 1:
            return None
        return (
            f"node {self.rank} of {self.count} is waiting at {self.address}:{self.port} for the others (started with"
            f" the same NNODES, MASTER_ADDR and MASTER_PORT, and each its own NODE_RANK from 0 to {self.count - 1}?)"
        )


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
    except Refused as refused:
        print(refused, file=sys.stderr)
        return exit_status.REFUSED
    environ = rank_environment(os.environ, run)
    node = f" of node {nodes.rank} of {nodes.count}" if nodes.count > 1 else ""
    place = "GPUs" if run.device == "cuda" else f"CPU with OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}"
    print(f"titan5d: ranks on the {place}{node}: {run.ranks} (NGPU=n starts n)", file=sys.stderr)
    command = [*torchrun(nodes, run.ranks), "-m", "titan5d", "train", *run.arguments]
    return supervise(command, environ, run.ranks, nodes.waiting(), run.init_timeout)


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


def read_nodes(environ: Mapping[str, str]) -> Nodes:
    """Reads NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. Raises Refused with all that is missing or wrong."""
    problems: list[str] = []
    count = _integer(environ, "NNODES", 1, problems)
    port = _integer(environ, "MASTER_PORT", None, problems)
    if port is not None and not 0 < port < 65536:
        problems.append(f"MASTER_PORT={port} is not a port: 1 to 65535")
    if count is not None and count < 1:
        problems.append(f"NNODES={count} must be at least 1")
    if count is None or count <= 1:
        _raise_if(problems)
        return Nodes(port=port)
    rank = _integer(environ, "NODE_RANK", None, problems)
    if "NODE_RANK" not in environ:
        problems.append(f"NNODES={count} needs NODE_RANK: 0 on the node at MASTER_ADDR, 1 to {count - 1} on the others")
    elif rank is not None and not 0 <= rank < count:
        problems.append(f"NODE_RANK={rank} is outside 0 to {count - 1} (NNODES={count})")
    address = environ.get("MASTER_ADDR", "")
    if not address:
        problems.append(
            f"NNODES={count} needs MASTER_ADDR: the host name or address of node 0, the same on all nodes"
            f" (and MASTER_PORT, a free port there, unless {DEFAULT_PORT} is)"
        )
    _raise_if(problems)
    return Nodes(count, rank or 0, address, port or DEFAULT_PORT)


def prepare(argv: Sequence[str], environ: Mapping[str, str], nodes: Nodes) -> Run:
    """Reads and checks the config for the ranks it will get. Raises Refused with everything that is wrong."""
    from titan5d.config.check import check
    from titan5d.config.load import ConfigError, load_config
    from titan5d.models.families import model_args

    problems: list[str] = []
    wanted = environ.get("DEVICE")
    if wanted not in (None, "", "cpu", "cuda"):
        problems.append(f"DEVICE={wanted} must be cpu or cuda")
    asked = _integer(environ, "NGPU", None, problems)
    if asked is not None and asked < 1:
        problems.append(f"NGPU={asked} must be at least 1: it is the number of ranks on this node, also on the CPU")
    _raise_if(problems)

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
        ranks = asked or ranks_on_a_node(config.parallelism, device, gpus, nodes.count)
        if device == "cuda" and ranks > gpus:
            raise Refused(f"refused: NGPU={ranks} ranks, but there are {gpus} GPUs here; a GPU holds one rank")
        args = model_args(config.model, config.moe, config.debug.moe_force_load_balance)
        layout = check(config, args, ranks * nodes.count)
        if device == "cpu":  # with GPUs each rank asks its own
            from titan5d.hardware import host_memory_limit
            from titan5d.plan.fits import memory_problems

            misfits = memory_problems(config, args, layout, device, ranks) + too_many(ranks, host_memory_limit())
            if misfits:
                raise ConfigError(misfits)
    except ConfigError as error:
        raise Refused(str(error)) from None
    return Run(arguments, ranks, device, config.comm.init_timeout_seconds)


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


def torchrun(nodes: Nodes, ranks: int) -> list[str]:
    """The torchrun command for this node's ranks, without the program they run."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    if nodes.count == 1 and nodes.port is None:
        # --local-addr: the ranks meet at this address, not at a host name that may not resolve
        return [*start, "--standalone", "--local-addr=127.0.0.1"]
    return [
        *start,
        f"--nnodes={nodes.count}",
        f"--node-rank={nodes.rank}",
        f"--master-addr={nodes.address}",
        f"--master-port={nodes.port}",
    ]


def rank_environment(environ: Mapping[str, str], run: Run) -> dict[str, str]:
    """The environment of the ranks: an equal share of the cores, and on the CPU no threads that spin while waiting."""
    defaults = {"OMP_NUM_THREADS": str(max(1, count_cores() // run.ranks))}
    if run.device == "cpu":
        defaults |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    return {**defaults, **environ}


def _integer(environ: Mapping[str, str], name: str, default: int | None, problems: list[str]) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        problems.append(f"{name}={text} is not a whole number")
        return default


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise Refused("\n".join(f"refused: {problem}" for problem in problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
