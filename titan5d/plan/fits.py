"""Does a run fit in the memory of the machine it is started on? Answered with numbers before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from titan5d.config.check import Layout
from titan5d.config.schema import Config
from titan5d.models.args import ModelArgs, count_parameters
from titan5d.plan.memory import StateBytes, layer_activation_bytes, state_bytes

GIB = 2**30
ELEMENT = {"float32": 4, "bfloat16": 2}
OPTIMIZER_BYTES = {"AdamW": 8, "Adam": 8, "Muon": 4, "SGD": 4}


def rank_bytes(config: Config, args: ModelArgs, layout: Layout) -> tuple[StateBytes, float]:
    """(training state, activations) in bytes of the fullest rank, as a lower bound: no fragmentation, no workspaces."""
    topology, training = layout.topology, config.training
    count = count_parameters(args)
    model_cut = topology.tp * topology.pp
    optimizer = OPTIMIZER_BYTES[config.optimizer.name]
    if config.optimizer.name == "SGD" and not config.optimizer.momentum:
        optimizer = 0
    state = state_bytes(
        count.total // model_cut,
        count.largest_unit // topology.tp,
        layout.zero_stage,
        topology.dp_shard * topology.cp,
        ELEMENT[training.dtype],
        ELEMENT[training.mixed_precision_param],
        optimizer * ELEMENT[training.dtype] // 4,
    )
    tokens = training.local_batch_size * training.seq_len // topology.cp
    element = ELEMENT[training.mixed_precision_param]
    kept = layer_activation_bytes(args, tokens, element, config.activation_checkpoint.mode)
    return state, kept * args.n_layers / model_cut


def memory_problems(
    config: Config, args: ModelArgs, layout: Layout, device_type: str, ranks_here: int
) -> list[str]:
    """One sentence when the ranks of this machine need more than its memory, else nothing."""
    state, activations = rank_bytes(config, args, layout)
    need = state.total + activations
    if device_type == "cuda":
        have, place = float(torch.cuda.get_device_properties(0).total_memory), "this GPU"
    else:
        need, have, place = need * ranks_here, machine_memory(), f"this machine ({ranks_here} CPU ranks)"
    if need <= have:
        return []
    total = count_parameters(args).total
    each = f"{state.weights / GIB:.1f} weights + {state.gradients / GIB:.1f} gradients + {state.optimizer / GIB:.1f}"
    each += f" optimizer + {state.gathered / GIB:.1f} gathered weights + {activations / GIB:.1f} activations"
    return [
        f"model.flavor = {config.model.flavor!r} has {total:,} parameters; on {layout.topology} with zero_stage"
        f" {layout.zero_stage} a rank needs at least {(state.total + activations) / GIB:.1f} GiB ({each}), in all"
        f" {need / GIB:.1f} GiB on {place}, which has {have / GIB:.1f} GiB. Train on more or larger devices, shard more"
        " (a higher zero_stage, more ranks), recompute (activation_checkpoint.mode = 'full'), or take a smaller"
        " model.flavor"
    ]


def machine_memory() -> float:
    """Bytes of memory this machine, or the container the process runs in, can give."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = float(meminfo["MemTotal"].split()[0]) * 1024
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.is_file() and limit.read_text().strip().isdigit():
            total = min(total, float(limit.read_text()))
    return total
