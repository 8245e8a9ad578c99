"""Rules of `parallelism.pipeline_parallel_expert_parallel_overlap` and its layout; called by check.py, like
check_precision.py."""

from __future__ import annotations

from dataclasses import replace

from titan5d.config.pipeline_plan import PipelinePlan
from titan5d.config.schema import Config
from titan5d.schedules import catalog
from titan5d.topology import Topology

KEY = "parallelism.pipeline_parallel_expert_parallel_overlap = true"
SCHEDULE, CSV = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv"


def overlap_problems(config: Config, topology: Topology, plan: PipelinePlan | None) -> list[str]:
    """Why there is nothing to overlap. plan: None = the layers are not cut, or not in a way that works."""
    par = config.parallelism
    if not par.pipeline_parallel_expert_parallel_overlap:
        return []
    if topology.pp == 1 or topology.expert_ranks == 1:
        return [
            f"{KEY} lets rows of one micro-batch travel to experts while another computes, in slots of DualPipeV, but"
            f" pipeline_parallel_degree = {topology.pp} and expert_parallel_degree = {topology.ep}; set both to 2 or"
            " more, with pipeline_parallel_schedule = 'DualPipeV', or leave it out"
        ]
    if plan is None or plan.has_overlaps:
        return []
    if par.pipeline_parallel_schedule_csv:
        return [
            f"{KEY}, but the table of {CSV} = {par.pipeline_parallel_schedule_csv!r} has no slot with a forward and a"
            " backward (OVERLAP_F_B); use one that has, or leave the key out"
        ]
    if par.pipeline_parallel_schedule != "DualPipeV":
        return [
            f"{KEY}, but {SCHEDULE} = {par.pipeline_parallel_schedule!r} has no slot with a forward and a backward; use"
            " 'DualPipeV', or leave the key out"
        ]
    size, count, least = plan.microbatch_size, plan.schedule.microbatches, _least(plan)
    local = config.training.local_batch_size
    rows = -(-least * size // local) * local
    return [
        f"{KEY}, but DualPipeV on {topology.pp} pipeline ranks has slots with a forward and a backward from {least}"
        f" micro-batches on, and a step of this run has {count} of {size} rows on each pipeline; set"
        f" training.global_batch_size to {rows * topology.dp} or more, or leave the key out"
    ]


def _least(plan: PipelinePlan) -> int:
    """Micro-batches from which on the table has overlapped slots."""
    table = plan.schedule
    ranks, chunks, count = table.n_ranks, table.n_stages // table.n_ranks, table.microbatches
    while not replace(plan, schedule=catalog.build("DualPipeV", ranks, chunks, count)).has_overlaps:
        count += 1
    return count
