"""What to change in a config that does not fit: single keys are tried one by one, then pairs, each planned anew.

Nothing that changes what is learned is tried: a smaller micro-batch keeps the global batch.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from titan5d.config.load import ConfigError
from titan5d.config.schema import Config
from titan5d.plan.plan_run import plan_run
from titan5d.plan.predict import Machine, Prediction

Change = tuple[str, Any]
"""(dotted key, value)."""


@dataclass(frozen=True)
class Advice:
    """Keys to set, and what is predicted then."""

    changes: tuple[Change, ...]
    prediction: Prediction

    def __str__(self) -> str:
        return ", ".join(f"{key} = {_toml(value)}" for key, value in self.changes)


def changes_that_fit(config: Config, machine: Machine, now: Prediction, most: int = 5) -> list[Advice]:
    """The fastest first. Single keys; pairs only where no single key is enough."""
    rows = round(now.case.global_tokens / now.case.seq_len)
    tried: list[Advice] = []
    for change in possible_changes(config, now):
        found = _try(config, machine, (change,), rows)
        if found is not None:
            tried.append(found)
    fitting = [one for one in tried if one.prediction.fits]
    if not fitting:
        lowering = sorted(tried, key=lambda one: one.prediction.fullest.total)[:8]
        for first, second in combinations(lowering, 2):
            if first.changes[0][0] != second.changes[0][0]:
                both = _try(config, machine, first.changes + second.changes, rows)
                if both is not None and both.prediction.fits:
                    fitting.append(both)
    return sorted(fitting, key=lambda one: -one.prediction.tokens_per_second)[:most]


def possible_changes(config: Config, now: Prediction) -> list[Change]:
    """Single keys that may lower memory, whether or not they fit the model."""
    case, topology = now.case, now.case.topology
    par, training = "parallelism.", "training."
    changes: list[Change] = []
    modes = ["none", "selective", "full"]
    mode = config.activation_checkpoint.mode
    later = modes[modes.index(mode) + 1 :] if mode in modes else ["full"]
    changes += [("activation_checkpoint.mode", each) for each in later]
    if config.training.loss_chunk_mib != 64.0:
        changes.append((training + "loss_chunk_mib", 64.0))
    if case.shards > 1:
        changes += [(par + "zero_stage", stage) for stage in range(case.zero_stage + 1, 4)]
    local = config.training.local_batch_size
    changes += [(training + "local_batch_size", size) for size in range(1, local) if local % size == 0]
    size = config.parallelism.pipeline_parallel_microbatch_size
    if topology.pp > 1:
        changes += [
            (par + "pipeline_parallel_microbatch_size", each) for each in range(1, size) if size % each == 0
        ]
        changes += [
            (par + "pipeline_parallel_schedule", name)
            for name in ("1F1B", "InterleavedZeroBubble")
            if name != config.parallelism.pipeline_parallel_schedule
        ]
    for name, degree in (
        ("tensor_parallel_degree", topology.tp),
        ("context_parallel_degree", topology.cp),
        ("pipeline_parallel_degree", topology.pp),
        ("expert_parallel_degree", topology.ep),
        ("expert_tensor_parallel_degree", topology.etp),
    ):
        changes += [(par + name, degree * factor) for factor in (2, 4, 8)]
    if topology.tp > 1 and not config.parallelism.tensor_parallel_regather_input:
        changes.append((par + "tensor_parallel_regather_input", True))
    if case.args.n_experts and not config.moe.score_before_w2:
        changes.append(("moe.score_before_w2", True))
    if not config.training.enable_cpu_offload:
        changes.append((training + "enable_cpu_offload", True))
    return changes


def changed(config: Config, changes: tuple[Change, ...], global_batch: int) -> Config:
    """A copy with the changes; the batch stays, and the shard degree takes the ranks that other degrees leave."""
    copy = deepcopy(config)
    for key, value in changes:
        section, _, name = key.partition(".")
        setattr(getattr(copy, section), name, value)
        if name.endswith("_parallel_degree") and not name.startswith("expert_"):  # those take no ranks
            copy.parallelism.data_parallel_shard_degree = -1
    copy.training.global_batch_size = global_batch
    return copy


def _try(config: Config, machine: Machine, changes: tuple[Change, ...], global_batch: int) -> Advice | None:
    """None where the run would be refused."""
    try:
        prediction, _ = plan_run(changed(config, changes, global_batch), machine)
    except ConfigError:
        return None
    return Advice(changes, prediction)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return (
        f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    )
