"""The network of namespaces itself: nodes reach each other, links are counted, slowed and cut, nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from integration_tests.multinode.network import (
    NAMESPACES,
    PREFIX,
    Network,
    network,
    remove_stale,
    unavailable,
)
from integration_tests.multinode.ranks import run_on_nodes

ROOT = Path(__file__).parents[2]
MB = 1_000_000


def all_reduce(elements: int, repeats: int) -> float:
    """Seconds of an all-reduce over all ranks, the first one left out."""
    tensor = torch.ones(elements)
    dist.all_reduce(tensor)
    dist.barrier()
    started = time.monotonic()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    dist.barrier()
    assert tensor[0] == dist.get_world_size() ** (repeats + 1)
    return (time.monotonic() - started) / repeats


def test_bytes_are_counted_and_a_limit_slows_the_link(two_nodes: Network) -> None:
    """A ring all-reduce of two ranks sends its whole buffer once: 2 * (n-1)/n * 4 MB."""
    before = two_nodes.sent_bytes(0)
    fast = max(run_on_nodes(two_nodes, 1, all_reduce, MB, 4))
    sent = two_nodes.sent_bytes(0) - before
    assert 5 * 4 * MB < sent < 1.05 * 5 * 4 * MB
    two_nodes.limit(100)
    slow = max(run_on_nodes(two_nodes, 1, all_reduce, MB, 1))
    assert slow > 0.8 * 4 * MB * 8 / 100e6 > 3 * fast


def test_ranks_of_one_node_do_not_use_the_link(two_nodes: Network) -> None:
    before = two_nodes.sent_bytes(0)
    run_on_nodes(two_nodes, 2, all_reduce_inside, MB)
    assert two_nodes.sent_bytes(0) - before < 0.1 * MB


def all_reduce_inside(elements: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(torch.ones(elements), group=groups[dist.get_rank() // 2])


def test_a_cut_cable(two_nodes: Network) -> None:
    ping = ["ip", "netns", "exec", two_nodes.namespace(0), sys.executable, "-S", "-c", CONNECT]
    two_nodes.link(1, "down")
    assert subprocess.run(ping, timeout=30, check=False).returncode == 1  # silence
    two_nodes.link(1, "up")
    deadline = time.monotonic() + 20  # the bridge listens for a while
    while subprocess.run(ping, timeout=30, check=False).returncode != 0:
        assert time.monotonic() < deadline


CONNECT = """
import socket, sys
try:
    socket.create_connection(("10.77.0.2", 9), timeout=0.5)
except ConnectionRefusedError:
    sys.exit(0)  # somebody answered
except OSError:
    sys.exit(1)
"""


def fail_on_a_node(output: Path) -> None:
    with network(2) as net, output.open("w") as out:
        child = net.popen(1, ["sleep", "60"], os.environ, out)
        while net.processes(1) != [child.pid]:
            time.sleep(0.05)
        raise RuntimeError(f"{net.name} {child.pid}")


def test_nothing_stays_behind_after_a_failure(tmp_path: Path) -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with pytest.raises(RuntimeError) as failed:
        fail_on_a_node(tmp_path / "out")
    name, child = str(failed.value).split()
    assert not list(NAMESPACES.glob(f"{name}-*"))
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or " Z " in status.read_text()


def test_what_an_interrupted_run_left_is_removed_by_the_next(two_nodes: Network) -> None:
    program = (
        "import os, signal, integration_tests.multinode.network as n\n"
        "with n.network(1) as net: os.kill(os.getpid(), signal.SIGKILL)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen([sys.executable, "-c", program], env=environ)
    assert killed.wait(timeout=60) == -9
    name = f"{PREFIX}{killed.pid}"
    assert (NAMESPACES / f"{name}-0").exists()
    remove_stale()
    assert not list(NAMESPACES.glob(f"{name}-*"))
    assert (NAMESPACES / two_nodes.namespace(0)).exists(), "a network in use stays"
