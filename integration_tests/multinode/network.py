"""Nodes on one machine: network namespaces joined by a bridge, with links that can be slowed, cut and counted.

    t5-<pid>-hub   bridge br0 --+-- port0 ~~veth~~ eth0  10.77.0.1   namespace t5-<pid>-0   "node 0"
                                +-- port1 ~~veth~~ eth0  10.77.0.2   namespace t5-<pid>-1   "node 1"

The bridge has a namespace of its own, so that nothing is added to the machine's network: when the namespaces go, their
interfaces go with them. The name holds the process that made them; those of a process that is gone are stale, and
the next network removes them first, with the processes in them.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

PREFIX = "t5-"
NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000


class Network:
    """Up while its context (`network`) is. Nodes are numbered from 0."""

    def __init__(self, name: str, nodes: int) -> None:
        self.name, self.nodes = name, nodes

    def namespace(self, node: int) -> str:
        return f"{self.name}-{node}"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def popen(
        self, node: int, command: Sequence[str], environ: Mapping[str, str], output: IO[str]
    ) -> subprocess.Popen[str]:
        """Starts a process on a node, in a session of its own; what it prints goes to `output`."""
        inside = ["ip", "netns", "exec", self.namespace(node), *command]
        return subprocess.Popen(
            inside, env=environ, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def enter(self, node: int) -> None:
        """Moves the calling thread, and what it starts, to a node."""
        with (NAMESPACES / self.namespace(node)).open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {self.namespace(node)}")

    def sent_bytes(self, node: int) -> int:
        """Bytes that have left a node, frames and all, since the network came up."""
        command = ["ip", "-n", self.namespace(node), "-j", "-s", "link", "show", "dev", "eth0"]
        (link,) = json.loads(_run(command).stdout)
        return int(link["stats64"]["tx"]["bytes"])

    def limit(self, megabits: int) -> None:
        """Bandwidth of each node's link, in both directions."""
        rate = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "100ms"]
        for node in range(self.nodes):
            for namespace, device in ((self.namespace(node), "eth0"), (f"{self.name}-hub", f"port{node}")):
                _run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate])

    def link(self, node: int, state: str) -> None:
        """Cuts a node's cable ("down") or plugs it in again ("up"). Its connections stay, and hear nothing."""
        _run(["ip", "-n", f"{self.name}-hub", "link", "set", f"port{node}", state])

    def processes(self, node: int) -> list[int]:
        return _processes(self.namespace(node))

    def kill_node(self, node: int) -> None:
        """Its power is gone: every process on it ends at once."""
        _end(self.namespace(node))


@contextmanager
def network(nodes: int) -> Iterator[Network]:
    """A network of `nodes` nodes; it and all processes on it are gone afterwards, whatever happened."""
    assert 1 <= nodes <= 200
    remove_stale()
    net = Network(f"{PREFIX}{os.getpid()}", nodes)
    hub = f"{net.name}-hub"
    try:
        _run(["ip", "netns", "add", hub])
        _run(["ip", "-n", hub, "link", "add", "br0", "type", "bridge"])
        _run(["ip", "-n", hub, "link", "set", "br0", "up"])
        for node in range(nodes):
            here = net.namespace(node)
            _run(["ip", "netns", "add", here])
            # Made inside the hub with its other end in the node: the machine's own interfaces are never touched
            _run(f"ip -n {hub} link add port{node} type veth peer name eth0 netns {here}".split())
            _run(f"ip -n {hub} link set port{node} master br0 up".split())
            _run(f"ip -n {here} address add {net.address(node)}/24 dev eth0".split())
            _run(f"ip -n {here} link set eth0 up".split())
            _run(f"ip -n {here} link set lo up".split())
        yield net
    finally:
        remove(net.name)


def remove(name: str) -> None:
    """Ends all processes of a network and removes it. Does nothing when it is gone."""
    namespaces = [path.name for path in NAMESPACES.glob(f"{name}-*")] if NAMESPACES.is_dir() else []
    for namespace in namespaces:
        _end(namespace)
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=30, check=False)


def remove_stale() -> None:
    """Removes networks whose maker is gone: an interrupted run could not."""
    names = (
        {path.name.rpartition("-")[0] for path in NAMESPACES.glob(f"{PREFIX}*")}
        if NAMESPACES.is_dir()
        else set()
    )
    for name in names:
        maker = name.removeprefix(PREFIX)
        if not (maker.isdigit() and Path(f"/proc/{maker}").exists()):
            remove(name)


@cache
def unavailable() -> str | None:
    """Why this machine can have no such network, or None. Tried, not guessed."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"needs the program {program} (iproute2)"
    try:
        with network(1) as net:
            net.limit(1000)
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces and tc tbf (root): {' '.join(error.cmd)}: {error.stderr.strip()}"
    return None


def _processes(namespace: str) -> list[int]:
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=30, check=False
    )
    return [int(pid) for pid in listed.stdout.split() if int(pid) != os.getpid()]


def _end(namespace: str) -> None:
    """Kills until none is left: one may have started another meanwhile."""
    deadline = time.monotonic() + 20
    while (pids := _processes(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
