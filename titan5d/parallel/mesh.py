"""Topology -> torch DeviceMeshes and process groups: the one place where they are made.

The same grid of ranks (topology.py), seen by its two users:

    tokens      (pp, dp_replicate, dp_shard, cp, tp)     who holds which part of the batch
    parameters  (pp, dp_replicate, shard, tp)            who holds which part of the weights; shard = dp_shard x cp:
                                                         context ranks hold the same weights, so they share them as
                                                         data ranks do
    batch = dp_replicate x dp_shard          ranks that read different rows
    loss  = dp_replicate x dp_shard x cp     ranks that hold different tokens: losses are summed here
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan5d.parallel.pipeline_messages import PipelineGroups
from titan5d.topology import AXES, Topology


class Meshes:
    """The meshes of one rank, by purpose. Every rank of the world must build it at the same time.

    Attributes:
        tokens, parameters: the two views of the world.
        batch, loss: one-dimensional meshes (see the module's text).
        pipeline: the groups of hidden states and their gradients; None without pipeline ranks.
        coordinates: axis name -> this rank's place on it.
        dp_rank: which slice of the batch this rank reads.
    """

    def __init__(self, topology: Topology, device_type: str, timeout: timedelta | None = None) -> None:
        self.topology = topology
        self.device_type = device_type
        self.tokens = init_device_mesh(
            device_type, tuple(topology.degree(axis) for axis in AXES), mesh_dim_names=AXES
        )
        shards = topology.dp_shard * topology.cp
        self.parameters = init_device_mesh(
            device_type,
            (topology.pp, topology.dp_replicate, shards, topology.tp),
            mesh_dim_names=("pp", "dp_replicate", "shard", "tp"),
        )
        self.batch = self.tokens["dp_replicate", "dp_shard"]._flatten("batch")
        self.loss = self.tokens["dp_replicate", "dp_shard", "cp"]._flatten("loss")
        self.pipeline: PipelineGroups | None = None
        if topology.pp > 1:
            ranks = dist.get_process_group_ranks(self.group("pp"))
            up = dist.new_group(ranks, use_local_synchronization=True)
            self.pipeline = PipelineGroups(down=self.group("pp"), up=up)
        self.coordinates = topology.coordinates(dist.get_rank())
        self.dp_rank = topology.dp_rank(dist.get_rank())
        if timeout is not None:
            self.set_timeout(timeout)

    def data_parallel(self, stage: int) -> DeviceMesh:
        """The mesh that FSDP2 works on: one axis, or (dp_replicate, shard) for HSDP."""
        if stage == 0:  # everything on every rank: one of the two axes has one rank (check.py)
            return self.parameters["shard" if self.topology.dp_replicate == 1 else "dp_replicate"]
        return self.parameters["shard" if self.topology.dp_replicate == 1 else ("dp_replicate", "shard")]

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's group along one axis: pp, dp_replicate, dp_shard, cp, tp, shard, batch or loss."""
        if axis == "batch":
            return self.batch.get_group()
        if axis == "loss":
            return self.loss.get_group()
        return (self.parameters if axis == "shard" else self.tokens).get_group(axis)

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Name -> this rank's group, for every axis and joint axis."""
        return {axis: self.group(axis) for axis in (*AXES, "shard", "batch", "loss")}

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of every collective; subgroups do not inherit the world's."""
        parameters = [self.parameters.get_group(axis) for axis in ("pp", "dp_replicate", "tp")]
        pipeline = [] if self.pipeline is None else [self.pipeline.up]
        for group in [*self.groups().values(), *parameters, *pipeline, dist.group.WORLD]:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
