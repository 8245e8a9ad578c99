"""Does a run fit in the memory of the machine it is started on? Answered with numbers before anything is allocated.

Also: which ZeRO stage is the least that fits, where the config leaves that open.
"""

from __future__ import annotations

from dataclasses import replace

from titan5d.config.check import Layout, leaves_zero_stage_open
from titan5d.config.schema import Config
from titan5d.hardware import GIB, host_memory_limit
from titan5d.models.args import ModelArgs, count_parameters
from titan5d.plan.assumptions import Assumptions
from titan5d.plan.case import case_of
from titan5d.plan.rank_memory import RankMemory, fullest, pipeline_memory

FILL = 0.8
"""Share of the memory that an estimate may fill: the rest is for kernels' workspaces, buffers and fragmentation."""

BARE = Assumptions(
    gemm=1.0, attention_forward=1.0, attention_backward=1.0, load_imbalance=1.0, allocator=0.0, context=0.0
)
"""Tensors only: no fragmentation, no context, experts evenly loaded. Times are not asked for."""


def fullest_rank(config: Config, args: ModelArgs, layout: Layout, device_type: str) -> RankMemory:
    """Bytes by line of the fullest rank at its fullest moment, on its device."""
    case = case_of(config, args, layout)
    if device_type == "cpu":
        case = replace(case, offload=False)  # the host's memory is the device's
    return fullest(pipeline_memory(case, BARE))


def peak_bytes(config: Config, args: ModelArgs, layout: Layout, device_type: str) -> float:
    """Bytes of the fullest rank on its device at the fullest moment of a step."""
    return fullest_rank(config, args, layout, device_type).total


def least_zero_stage(
    config: Config, args: ModelArgs, layout: Layout, device_type: str, ranks_here: int
) -> tuple[int, str]:
    """(the least of the stages 1, 2, 3 whose estimate fits, one line that says why); 3 if none does.

    Less sharding is less communication and fewer interruptions, so what fits need not be cut.
    """
    have, place = device_memory(device_type, ranks_here)
    shown, chosen = [], 3
    for stage in (1, 2, 3):
        need = peak_bytes(config, args, replace(layout, zero_stage=stage), device_type)
        shown.append(f"stage {stage} needs {need / GIB:.2f} GiB")
        if need <= FILL * have:
            chosen = stage
            break
    return chosen, (
        f"zero_stage {chosen}, the least that fits: {', '.join(shown)} a rank, and {FILL:.0%} of what a rank has on"
        f" {place} are {FILL * have / GIB:.2f} GiB; set parallelism.zero_stage to choose otherwise"
    )


def device_memory(device_type: str, ranks_here: int) -> tuple[float, str]:
    """(bytes one rank may use, the place they are in)."""
    if device_type == "cuda":
        import torch  # only here: the checks before a CPU run start must be quick

        return float(torch.cuda.get_device_properties(0).total_memory), "this GPU"
    return host_memory_limit() / ranks_here, f"this machine ({ranks_here} CPU ranks)"


def memory_problems(
    config: Config, args: ModelArgs, layout: Layout, device_type: str, ranks_here: int
) -> list[str]:
    """One sentence when the ranks of this machine need more than its memory, else nothing."""
    if leaves_zero_stage_open(config, layout.topology):
        layout = replace(layout, zero_stage=3)  # what is left when nothing less fits
    rank = fullest_rank(config, args, layout, device_type)
    need, lines = rank.total, rank.lines
    have, place = device_memory(device_type, ranks_here)
    if need <= have:
        return []
    total = count_parameters(args).total
    buffers = sum(size for name, size in lines.items() if "buffers" in name) + lines["gathered weights"]
    activations = sum(
        lines[name] for name in ("activations", "recomputed block", "block gradients", "logits and loss")
    )
    each = f"{lines['weights'] / GIB:.1f} weights + {lines['gradients'] / GIB:.1f} gradients"
    each += f" + {lines['moments'] / GIB:.1f} optimizer + {buffers / GIB:.1f} gathered weights and buffers"
    each += f" + {activations / GIB:.1f} activations"
    ranks = ranks_here if device_type == "cpu" else 1
    return [
        f"model.flavor = {config.model.flavor!r} has {total:,} parameters; on {layout.topology} with zero_stage"
        f" {layout.zero_stage} a rank needs at least {need / GIB:.1f} GiB ({each}), in all"
        f" {need * ranks / GIB:.1f} GiB on {place}, which has {have * ranks / GIB:.1f} GiB. Train on more or larger"
        " devices, shard more (a higher zero_stage, more ranks), recompute (activation_checkpoint.mode = 'full'), or"
        " take a smaller model.flavor"
    ]
