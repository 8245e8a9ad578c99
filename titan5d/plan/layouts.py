"""All layouts of a model on a machine that the rules of config/check.py allow, as configs-to-be.

    gpus = dp_replicate x dp_shard x cp x tp x pp      ep divides dp_shard x cp x tp
    rows of a rank and step = global batch / dp        micro-batch size divides them

Legality is not decided here: each set of degrees goes through `check` itself, once. Rules of thumb (`Priors`) say which
degrees are worth trying; each can be seen, and set by a flag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

from titan5d.config.check import check
from titan5d.config.load import ConfigError
from titan5d.config.schema import Config
from titan5d.models.args import ModelArgs, count_parameters
from titan5d.topology import Topology

ROWS = (1, 2, 4, 8, 16)
"""Micro-batch sizes that are tried."""
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
"""Recompute, from the least to the most: with all else equal each is faster than the next."""
SCHEDULES = (
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
    ("InterleavedZeroBubble", 1),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
)
"""(name, stages a rank). GPipe and LoopedBFS hold all micro-batches and idle as much as 1F1B and Interleaved1F1B."""


@dataclass(frozen=True)
class Priors:
    """Rules of thumb about what to try.

    Attributes:
        max_tp: tensor ranks at most; a node's, since each block waits for their messages.
        cp_from: tokens of a row from which context parallelism is tried.
        pp_from: parameters from which pipelines are tried; each pipeline rank keeps whole nodes. max_pp: their ranks at
            most, since ever more micro-batches are needed to fill them.
        max_etp: slices of an expert at most. For the same memory slices cost more traffic than fewer experts a rank or
            ZeRO do (docs/expert_parallel.md), so by default experts stay whole.
        hsdp_nodes: from how many to how many nodes replicas of sharded copies are tried.
        least_zero: ZeRO-3 is tried only where ZeRO-2 does not fit, ZeRO-2 where ZeRO-1 does not.
        fill: share of a GPU's memory that a layout may need.
    """

    max_tp: int
    cp_from: int = 65_536
    pp_from: float = 30e9
    max_pp: int = 32
    max_etp: int = 1
    hsdp_nodes: tuple[int, int] = (2, 8)
    least_zero: bool = True
    fill: float = 0.9

    def lines(self) -> list[str]:
        """For people, with the flags that change them."""
        first, last = self.hsdp_nodes
        return [
            f"tensor parallelism inside a node: at most {self.max_tp} ranks (--max-tp)",
            f"context parallelism from {self.cp_from:,} tokens a row (--cp-from)",
            f"pipelines from {self.pp_from / 1e9:g} G parameters, of at most {self.max_pp} ranks of whole nodes"
            " (--pp-from, --max-pp)",
            f"experts in at most {self.max_etp} slices (--max-etp)"
            if self.max_etp > 1
            else "whole experts (--max-etp tries slices of them)",
            f"replicas of sharded copies (HSDP) on {first} to {last} nodes (--hsdp-nodes)",
            "the least ZeRO stage that fits (--any-zero tries all)"
            if self.least_zero
            else "every ZeRO stage (--any-zero)",
            f"at most {self.fill:.0%} of a GPU's memory (--fill)",
        ]


@dataclass(frozen=True)
class Candidate5:
    """One candidate: everything that the search varies."""

    topology: Topology
    zero_stage: int
    rows: int
    microbatches: int
    recompute: str
    schedule: str = ""
    chunks: int = 1

    def __str__(self) -> str:
        words = [str(self.topology)]
        if self.topology.dp * self.topology.cp > 1:
            words.append(f"ZeRO-{self.zero_stage}")
        words.append(f"{self.microbatches} x {self.rows} rows")
        words.append({"none": "no recompute"}.get(self.recompute, f"{self.recompute} recompute"))
        if self.schedule:
            words.append(self.schedule + (f" v={self.chunks}" if self.chunks > 1 else ""))
        return ", ".join(words)


def config_of(base: Config, layout: Candidate5) -> Config:
    """The base with the layout's keys."""
    config, topology = deepcopy(base), layout.topology
    par = config.parallelism
    par.data_parallel_replicate_degree = topology.dp_replicate
    par.data_parallel_shard_degree = topology.dp_shard
    par.context_parallel_degree = topology.cp
    par.tensor_parallel_degree = topology.tp
    par.pipeline_parallel_degree = topology.pp
    par.expert_parallel_degree, par.expert_tensor_parallel_degree = topology.ep, topology.etp
    par.zero_stage = layout.zero_stage  # type: ignore[assignment]
    config.activation_checkpoint.mode = layout.recompute  # type: ignore[assignment]
    config.training.local_batch_size = layout.rows
    par.pipeline_parallel_microbatch_size = layout.rows if topology.pp > 1 else 1
    par.pipeline_parallel_layers_per_stage = None
    if layout.schedule:
        par.pipeline_parallel_schedule = layout.schedule
    return config


def degrees(
    base: Config, args: ModelArgs, gpus: int, per_node: int, priors: Priors, rejected: Counter[str]
) -> Iterator[Topology]:
    """Every set of degrees that the rules and the priors allow; why others do not is counted in `rejected`."""
    nodes = max(1, gpus // per_node)
    large = count_parameters(args).total >= priors.pp_from
    batch = base.training.global_batch_size
    for tp in _divisors(gpus):
        if tp > args.n_heads:
            continue
        if tp > priors.max_tp:
            rejected["prior: tensor ranks beyond a node"] += 1
            continue
        for cp in _powers(gpus // tp):
            if cp > 1 and base.training.seq_len < priors.cp_from:
                rejected["prior: context parallelism for rows this short"] += 1
                continue
            for pp in _divisors(gpus // tp // cp):
                if pp > args.n_layers + 2:
                    continue
                if pp > 1 and (not large or pp > priors.max_pp or (gpus // pp) % min(per_node, gpus)):
                    rejected["prior: pipelines of a model this small, of parts of nodes, or this long"] += 1
                    continue
                dp = gpus // tp // cp // pp
                if batch % dp:
                    rejected[f"training.global_batch_size = {batch} does not divide over the data ranks"] += 1
                    continue
                for replicate in _replicas(dp, cp * tp, per_node, nodes, priors, rejected):
                    topology = Topology(replicate, dp // replicate, cp, tp, pp)
                    yield from _with_experts(base, args, topology, gpus, priors.max_etp, rejected)


def _replicas(
    dp: int, inner: int, per_node: int, nodes: int, priors: Priors, rejected: Counter[str]
) -> Iterator[int]:
    """Data-parallel ranks as replicas x shards: 1, or shards of whole nodes."""
    yield 1
    first, last = priors.hsdp_nodes
    for replicate in _divisors(dp)[1:]:
        shard = dp // replicate
        if shard == 1 or (shard * inner) % per_node:
            continue
        if not first <= nodes <= last:
            rejected["prior: HSDP on this many nodes"] += 1
            continue
        yield replicate


def _with_experts(
    base: Config, args: ModelArgs, topology: Topology, gpus: int, max_etp: int, rejected: Counter[str]
) -> Iterator[Topology]:
    """The degrees with each expert degree that `check` allows, and slices of experts up to `max_etp`."""
    ranks = topology.dp_shard * topology.cp * topology.tp
    choices = [(1, 1)]
    if args.n_experts:
        shares = [ep for ep in _divisors(ranks) if args.n_experts % ep == 0]
        choices = [(ep, etp) for ep in shares for etp in _powers(ranks // ep) if etp <= max_etp]
    for ep, etp in choices:
        found = replace(topology, ep=ep, etp=etp)
        stage = 0 if found.dp_shard * found.cp == 1 else 1
        rows = base.training.global_batch_size // found.dp  # one micro-batch: its table is short
        one = Candidate5(found, stage, rows, 1, "none", "1F1B" if found.pp > 1 else "")
        try:
            check(config_of(base, one), args, gpus)
        except ConfigError as error:
            rejected["refused: " + error.problems[0].split(" = ")[0].split(":")[0].split(" with ")[0]] += 1
            continue
        yield found


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers(number: int) -> list[int]:
    """Powers of two that divide."""
    return [2**n for n in range(number.bit_length()) if number % 2**n == 0]
