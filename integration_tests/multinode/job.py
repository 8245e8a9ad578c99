"""A run of several nodes as a user starts it: run_train.sh in each namespace, torchrun and its ranks below it.

    with job(net, folder, argv, ranks=1, nodes="2", restarts=1) as run:
        run.wait_for_step(12)
        os.kill(run.ranks(1)[0], signal.SIGKILL)
        assert run.statuses(within=90) == {0: 0, 1: 0}

Ranks obey two more signals than titan5d knows (INJECTED, below), so that a test can make a rank of a running job raise,
or hang in Python, at any moment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from integration_tests.multinode.network import Network
from titan5d.launch.supervise import rank_processes

ROOT = Path(__file__).resolve().parents[2]
PORT = 29555
QUICK_RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=3"
RAISE, HANG = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
INJECTED = f"""
import os, signal, time
def fail(number, frame):
    raise RuntimeError("injected failure")
def hang(number, frame):
    time.sleep(600)
if "LOCAL_RANK" in os.environ:
    signal.signal({int(RAISE)}, fail)
    signal.signal({int(HANG)}, hang)
"""


class Job:
    """The processes of one run; `start` a node, and start it again after it was killed."""

    def __init__(
        self, net: Network, folder: Path, argv: list[str], run_folder: Path, environ: dict[str, str]
    ) -> None:
        self.net, self.folder, self.argv, self.run_folder = net, folder, argv, run_folder
        self.environ = environ
        self.nodes: dict[int, subprocess.Popen[str]] = {}
        injected = folder / "injected"
        injected.mkdir(exist_ok=True)
        (injected / "sitecustomize.py").write_text(INJECTED)

    def start(self, node: int) -> None:
        environ = {**self.environ, "NODE_RANK": str(node), "PYTHONPATH": str(self.folder / "injected")}
        with self.log_file(node).open("a") as output:
            command = [str(ROOT / "run_train.sh"), *self.argv]
            self.nodes[node] = self.net.popen(node, command, environ, output)

    def log_file(self, node: int) -> Path:
        return self.folder / f"{self.run_folder.name}-node{node}.log"

    def log(self, node: int) -> str:
        return self.log_file(node).read_text()

    def ranks(self, node: int) -> list[int]:
        """Process ids of a node's ranks, by local rank; empty while there are none."""
        torchrun = children(self.nodes[node].pid)
        ranks = [pid for launcher in torchrun for pid in rank_processes(launcher)]
        return sorted(ranks, key=_local_rank)

    def last_step(self) -> int:
        """The last step that is in metrics.jsonl."""
        file = self.run_folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}") else 0

    def wait_for_step(self, step: int, within: float = 90.0) -> None:
        deadline = time.monotonic() + within
        while self.last_step() < step:
            ended = {node: process.poll() for node, process in self.nodes.items()}
            assert not all(code is not None for code in ended.values()), f"ended with {ended}\n{self.logs()}"
            assert time.monotonic() < deadline, f"no step {step} in {within:g} s\n{self.logs()}"
            time.sleep(0.02)

    def statuses(self, within: float) -> dict[int, int]:
        """Node -> exit status, once all have ended."""
        deadline = time.monotonic() + within
        for process in self.nodes.values():
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"not all nodes had ended after {within:g} s\n{self.logs()}") from None
        return {node: process.returncode for node, process in self.nodes.items()}

    def logs(self) -> str:
        return "\n".join(f"---- node {node}\n{self.log(node)[-6000:]}" for node in self.nodes)


@contextmanager
def job(
    net: Network,
    folder: Path,
    argv: list[str],
    run_folder: Path,
    ranks: int = 1,
    nodes: str = "2",
    restarts: int = 0,
    started: int | None = None,
) -> Iterator[Job]:
    """A job with `ranks` a node on the nodes 0 to `started` - 1 (default: all); nothing of it outlives the context.

    Args:
        nodes: NNODES, such as "2" or "1:2".
    """
    environ = {
        **os.environ,
        "TITAN5D_PYTHON": sys.executable,
        "DEVICE": "cpu",
        "NGPU": str(ranks),
        "OMP_NUM_THREADS": "1",
        "NNODES": nodes,
        "MASTER_ADDR": net.address(0),
        "MASTER_PORT": str(PORT),
        "MAX_RESTARTS": str(restarts),
        "RDZV_CONF": QUICK_RENDEZVOUS,
    }
    run = Job(net, folder, argv, run_folder, environ)
    try:
        for node in range(net.nodes if started is None else started):
            run.start(node)
        yield run
    finally:
        for node in range(net.nodes):
            net.kill_node(node)
        for process in run.nodes.values():
            process.wait(timeout=20)


def children(pid: int) -> list[int]:
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in file.read_text().split()] if file.exists() else []


def _local_rank(pid: int) -> int:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has just ended
        return -1
    return next((int(v.partition(b"=")[2]) for v in variables if v.startswith(b"LOCAL_RANK=")), -1)
