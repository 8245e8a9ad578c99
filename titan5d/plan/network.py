"""How long collectives take on a machine of nodes: bandwidth of the links they cross, latency of their hops.

    a node       8 GPUs, fast links between all of them (NVLink), one network card each

A ring through a whole node leaves it once for each of its rings, each ring by another card. So n ranks of which g sit
in one node move their bytes at g cards' bandwidth, at most the fast links': data-parallel groups of whole nodes are
nearly as fast as within one, and groups with one rank a node (beside 8 tensor ranks) have one card each.

    all-gather, reduce-scatter of D bytes over n ranks: (n - 1)/n D through each rank, n - 1 hops
    all-reduce: both, one after the other; on several nodes its latency grows as log2 (trees)
    all-to-all: what leaves the node goes at one card's bandwidth, the rest at the fast links'
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from titan5d.hardware import Device
from titan5d.plan.assumptions import Assumptions


@dataclass(frozen=True)
class Group:
    """Ranks that communicate.

    Attributes:
        size: how many they are; in_node: how many of them share a node.
    """

    size: int
    in_node: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.in_node)

    @property
    def crosses(self) -> bool:
        """Whether it leaves the node."""
        return self.nodes > 1

    @property
    def link(self) -> str:
        return "between nodes" if self.crosses else "inside a node"


@dataclass(frozen=True)
class Network:
    """Bandwidths in bytes/s of one GPU and one direction as the vendor has them; latencies in seconds of one hop."""

    per_node: int
    intra: float
    inter: float
    intra_latency: float
    inter_latency: float
    intra_share: float
    inter_share: float

    @staticmethod
    def of(
        device: Device,
        assumptions: Assumptions,
        per_node: int | None = None,
        intra: float | None = None,
        inter: float | None = None,
    ) -> Network:
        """The device's reference system, with what is given in its place."""
        return Network(
            per_node or device.fast_domain,
            intra or device.intra_node_bandwidth,
            inter or device.inter_node_bandwidth,
            device.intra_node_latency,
            device.inter_node_latency,
            assumptions.intra_link,
            assumptions.inter_link,
        )

    def group(self, size: int, stride: int) -> Group:
        """`size` ranks whose numbers lie `stride` apart, ranks of a node being numbered one after the other."""
        return Group(size, max(1, min(size, self.per_node // max(1, stride))))

    def bandwidth(self, group: Group) -> float:
        """At which a ring through the group moves the bytes of each rank."""
        inside = self.intra * self.intra_share
        if not group.crosses:
            return inside
        outside = self.inter * self.inter_share
        return min(inside, group.in_node * outside) if group.in_node > 1 else outside

    def ring(self, size: float, group: Group) -> float:
        """Seconds of an all-gather to, or a reduce-scatter of, `size` bytes."""
        if group.size == 1:
            return 0.0
        hops = (group.nodes - 1) * self.inter_latency + (group.size - group.nodes) * self.intra_latency
        return size * (group.size - 1) / group.size / self.bandwidth(group) + hops

    def all_reduce(self, size: float, group: Group) -> float:
        """Seconds of an all-reduce of `size` bytes."""
        if group.size == 1:
            return 0.0
        hops = 2 * (group.in_node - 1) * self.intra_latency
        if group.crosses:
            hops += 2 * log2(group.nodes) * self.inter_latency
        return 2 * size * (group.size - 1) / group.size / self.bandwidth(group) + hops

    def all_to_all(self, size: float, group: Group) -> float:
        """Seconds of an all-to-all in which each rank holds `size` bytes for all ranks, itself included."""
        if group.size == 1:
            return 0.0
        away = size * (group.size - group.in_node) / group.size
        near = size * (group.in_node - 1) / group.size
        times = [near / (self.intra * self.intra_share), away / (self.inter * self.inter_share)]
        return max(times) + (self.inter_latency if group.crosses else self.intra_latency) * max(
            1.0, log2(group.size)
        )

    def send(self, size: float, group: Group) -> float:
        """Seconds of a message of `size` bytes to a neighbour in the group."""
        if group.size == 1:
            return 0.0
        if group.in_node == 1:
            return size / (self.inter * self.inter_share) + self.inter_latency
        if group.crosses:  # the hop out of the node holds up the ring
            return size / (self.inter * self.inter_share) + self.inter_latency
        return size / (self.intra * self.intra_share) + self.intra_latency
