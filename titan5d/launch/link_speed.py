"""Before training: how fast are the links of each axis, and the ranks? About a second (comm.preflight = true).

    axis tp, 8 ranks inside a node: 341 GB/s, a small all-reduce 28 us (planned with: 450 GB/s, 3 us a hop)

All groups of an axis are measured at once, as in training, where they share the links. A bandwidth is that of a ring,
the bytes that each rank sends per second of a large all-reduce, 2 (n - 1) / n of its size, so it can be compared with
that of a link; the slowest group is shown.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan5d.hardware import Device, find_device
from titan5d.launch.wording import rank_list
from titan5d.parallel.mesh import Meshes

log = logging.getLogger("titan5d")

AXES = ("pp", "dp_replicate", "shard", "cp", "tp", "efsdp", "ep", "ep_etp")
SECONDS = 0.8
"""For all axes together."""
SMALL_CALLS = 20
MATMUL_SECONDS = 0.1
SLOW_RANK = 0.8
"""Of the median rank's matrix products: slower ranks are named."""
SLOW_LINK = 0.5
"""Of what is assumed of the link, or of the axis's median group: slower groups are named."""


@dataclass(frozen=True)
class AxisSpeed:
    """The links of one axis.

    Attributes:
        ranks: of the slowest group.
        inside: whether its ranks share a node's fast links.
        bandwidth, latency: bytes/s, and seconds of a small all-reduce, of that group.
        median: bandwidth of the median group.
    """

    axis: str
    ranks: list[int]
    inside: bool
    bandwidth: float
    latency: float
    median: float

    def text(self, assumed: Device | None) -> str:
        """A line for the log, beside what the planner assumes."""
        where = "inside a node" if self.inside else "across nodes"
        line = (
            f"axis {self.axis}, {len(self.ranks)} ranks {where}: {self.bandwidth / 1e9:.3g} GB/s, a small all-reduce"
            f" {self.latency * 1e6:.0f} us"
        )
        if assumed is None:
            return f"{line} (nothing is assumed of this device)" + self._slow(self.median)
        bandwidth = assumed.intra_node_bandwidth if self.inside else assumed.inter_node_bandwidth
        latency = assumed.intra_node_latency if self.inside else assumed.inter_node_latency
        line += f" (planned with: {bandwidth / 1e9:.3g} GB/s, {latency * 1e6:.0f} us a hop)"
        return line + self._slow(max(bandwidth, self.median))

    def _slow(self, expected: float) -> str:
        if self.bandwidth >= SLOW_LINK * expected:
            return ""
        return f"; SLOW: {rank_list(self.ranks)} reach {self.bandwidth / expected:.0%} of {expected / 1e9:.3g} GB/s"


def measure(meshes: Meshes, device: torch.device, ranks_on_a_node: int) -> None:
    """Measures links and ranks, and logs them on rank 0. Collective."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    assumed = find_device(name)
    axes = [axis for axis in AXES if _has_several(meshes, axis)]
    domain = max(ranks_on_a_node, assumed.fast_domain if assumed is not None else 0)
    for axis in axes:
        speed = measure_axis(axis, meshes.group(axis), device, domain, SECONDS / len(axes))
        log.info("preflight: %s", speed.text(assumed))
    log.info("preflight: %s", rank_speeds(matmul_speed(device)))


def measure_axis(
    axis: str, group: dist.ProcessGroup, device: torch.device, ranks_on_a_node: int, seconds: float
) -> AxisSpeed:
    """Times all-reduces on all groups of an axis at once. Every rank gets the slowest group's. Collective."""
    size = 2**24 if device.type == "cuda" else 2**19  # numbers: 64 MiB and 2 MiB
    large, small = torch.ones(size, device=device), torch.ones(1, device=device)
    dist.all_reduce(small, group=group)  # makes the connections
    latency = _seconds_of(lambda: dist.all_reduce(small, group=group), SMALL_CALLS, device)
    once = torch.tensor(_seconds_of(lambda: dist.all_reduce(large, group=group), 1, device), device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX)  # the same number of rounds everywhere
    rounds = max(1, min(50, int(seconds / max(float(once), 1e-9))))
    large.fill_(1)
    duration = _seconds_of(lambda: dist.all_reduce(large, group=group), rounds, device)
    n = group.size()
    bandwidth = size * large.element_size() * 2 * (n - 1) / n / duration
    mine = bandwidth, latency, dist.get_process_group_ranks(group)
    everyone: list[tuple[float, float, list[int]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    slowest = min(everyone, key=lambda one: one[0])
    inside = len({rank // ranks_on_a_node for rank in slowest[2]}) == 1
    median = statistics.median(one[0] for one in everyone)
    return AxisSpeed(axis, slowest[2], inside, slowest[0], slowest[1], median)


def matmul_speed(device: torch.device, seconds: float = MATMUL_SECONDS) -> float:
    """FLOP/s of this rank in matrix products, in the type it trains in: bf16 on a GPU, fp32 on a CPU."""
    n, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a = torch.ones(n, n, dtype=dtype, device=device)
    once = max(_seconds_of(lambda: a @ a, 2, device), 1e-9)
    return 2.0 * n**3 / _seconds_of(lambda: a @ a, max(1, min(1000, int(seconds / once))), device)


def rank_speeds(mine: float) -> str:
    """The ranks' matrix products in one sentence; those far below the median are named. Collective."""
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return speeds_text(everyone)


def speeds_text(speeds: list[float]) -> str:
    """The sentence of `rank_speeds`."""
    median = statistics.median(speeds)
    text = f"matrix products of the median rank: {median / 1e12:.3g} TFLOP/s"
    slow = sorted((speed, rank) for rank, speed in enumerate(speeds) if speed < SLOW_RANK * median)
    if not slow:
        return f"{text}, slowest {min(speeds) / median:.0%} of it"
    named = ", ".join(f"rank {rank} {speed / median:.0%}" for speed, rank in slow[:8])
    return f"{text}; SLOW: {named} of it: all ranks will wait for them"


def _seconds_of(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Mean seconds of `work`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / times


def _has_several(meshes: Meshes, axis: str) -> bool:
    if axis in ("efsdp", "ep", "ep_etp") and meshes.experts is None:
        return False
    if axis == "ep_etp" and meshes.topology.etp == 1:  # the same ranks as ep
        return False
    if axis == "cp" and meshes.topology.dp_shard == 1:  # the same ranks as shard
        return False
    return meshes.group(axis).size() > 1
