"""Topology -> torch DeviceMeshes and process groups: the one place where they are made.

The same grid of ranks (topology.py), seen by its two users:

    tokens      (pp, dp_replicate, dp_shard, cp, tp)     who holds which part of the batch
    parameters  (pp, dp_replicate, shard, tp)            who holds which part of the weights; shard = dp_shard x cp:
                                                         context ranks hold the same weights, so they share them as
                                                         data ranks do
    experts     (pp, dp_replicate, efsdp, etp, ep)       who holds which experts, if they are cut: ep neighbouring ranks
                                                         share the experts, etp such groups the width of each expert,
                                                         efsdp ranks the weights of that
    batch = dp_replicate x dp_shard          ranks that read different rows
    loss  = dp_replicate x dp_shard x cp     ranks that hold different tokens: losses are summed here
    stage = loss x tp                        ranks that route different tokens (with sequence parallelism)
    row   = cp x tp                          ranks that hold parts of the same rows
    ep_etp = etp x ep                        ranks that hold all experts among them and exchange rows
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
        experts: the third view; None where experts are shared as all other weights (ep, etp and tp are 1) or there
            are none.
        exchange: the ranks that hold all experts among them, one-dimensional: rank slice * ep + e holds slice `slice`
            of share e. None where `experts` is.
        batch, loss, stage, row: one-dimensional meshes (see the module's text). Without experts no rank asks for the
            last two, and they are loss and cp.
        pipeline: the groups of hidden states and their gradients; None without pipeline ranks.
        coordinates: axis name -> this rank's place on it.
        dp_rank: which slice of the batch this rank reads.
    """

    def __init__(
        self,
        topology: Topology,
        device_type: str,
        timeout: timedelta | None = None,
        has_experts: bool = False,
    ) -> None:
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
        self.stage, self.row = self.loss, self.tokens["cp"]
        self.experts: DeviceMesh | None = None
        self.exchange: DeviceMesh | None = None
        if has_experts and topology.expert_ranks * topology.tp > 1:
            self.experts = init_device_mesh(
                device_type,
                (topology.pp, topology.dp_replicate, topology.efsdp, topology.etp, topology.ep),
                mesh_dim_names=("pp", "dp_replicate", "efsdp", "etp", "ep"),
            )
            # of ep ranks alone there is a group already
            self.exchange = self.experts["etp", "ep"]._flatten("ep_etp") if topology.etp > 1 else self.experts["ep"]
        if has_experts and topology.tp > 1:
            self.stage = self.tokens["dp_replicate", "dp_shard", "cp", "tp"]._flatten("stage")
            self.row = self.tokens["cp", "tp"]._flatten("row")
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

    def expert_data_parallel(self, stage: int) -> DeviceMesh | None:
        """The same for the experts; None where they are part of their blocks."""
        if self.experts is None:
            return None
        if self.topology.dp_replicate == 1:
            return self.experts["efsdp"]
        both = self.experts["dp_replicate", "efsdp"]
        return both._flatten("expert_replicas") if stage == 0 else both

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's group along one axis: pp, dp_replicate, dp_shard, cp, tp, shard, batch, loss, stage, row; with a
        cut of the experts efsdp, etp, ep and ep_etp, too."""
        joint = {"batch": self.batch, "loss": self.loss, "stage": self.stage, "row": self.row}
        if axis in joint:
            return joint[axis].get_group()
        if axis == "ep_etp":
            assert self.exchange is not None
            return self.exchange.get_group()
        if axis in ("efsdp", "etp", "ep"):
            assert self.experts is not None
            return self.experts.get_group(axis)
        return (self.parameters if axis == "shard" else self.tokens).get_group(axis)

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Name -> this rank's group, for every axis and joint axis."""
        experts = () if self.experts is None else ("ep", "etp", "ep_etp", "efsdp", "stage", "row")
        return {axis: self.group(axis) for axis in (*AXES, "shard", "batch", "loss", *experts)}

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of every collective; subgroups do not inherit the world's."""
        parameters = [self.parameters.get_group(axis) for axis in ("pp", "dp_replicate", "tp")]
        pipeline = [] if self.pipeline is None else [self.pipeline.up]
        experts = (
            [] if self.experts is None else [self.experts.get_group(axis) for axis in ("pp", "dp_replicate")]
        )
        for group in [*self.groups().values(), *parameters, *pipeline, *experts, dist.group.WORLD]:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
