"""Ranks of several nodes forked from this process: each moves to its node's namespace, then meets the others there.

Importing torch takes seconds; forked ranks have it already. Whole programs (run_train.sh, torchrun) are in job.py.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from integration_tests.multinode.network import Network
from titan5d.launch.local_ranks import run_ranks


def run_on_nodes(
    net: Network, ranks_per_node: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Runs `fn(*args)` on `ranks_per_node` ranks of each node; returns the results in rank order.

    Neighbouring ranks share a node, as under torchrun. gloo talks over eth0 between nodes.
    """
    with tempfile.TemporaryDirectory(prefix="titan5d-nodes-") as folder:
        world = net.nodes * ranks_per_node
        store = Path(folder) / "store"
        return run_ranks(_on_node, world, net, ranks_per_node, store, fn, args, timeout, timeout=timeout)


def _on_node(
    net: Network,
    ranks_per_node: int,
    store: Path,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    # The group of run_ranks was joined before this rank was on its node. No rank leaves it before all have joined it
    everyone = dist.PrefixStore("joined", dist.FileStore(str(store), world))
    everyone.set(str(rank), "")
    everyone.wait([str(other) for other in range(world)], timedelta(seconds=timeout))
    dist.destroy_process_group()
    node, local_rank = divmod(rank, ranks_per_node)
    net.enter(node)
    os.environ.update(
        GLOO_SOCKET_IFNAME="eth0", LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(ranks_per_node)
    )
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    return fn(*args)
