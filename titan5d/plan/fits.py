"""Does a run fit in the memory of the machine it is started on? Answered with numbers before anything is allocated.

Also: which ZeRO stage is the least that fits, where the config leaves that open.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from titan5d.config.check import Layout, leaves_zero_stage_open
from titan5d.config.schema import Config
from titan5d.hardware import host_memory_limit
from titan5d.models.args import ModelArgs, count_parameters
from titan5d.plan.memory import StateBytes, head_activation_bytes, layer_activation_bytes, state_bytes

GIB = 2**30
ELEMENT = {"float32": 4, "bfloat16": 2}
OPTIMIZER_BYTES = {"AdamW": 8, "Adam": 8, "Muon": 4, "SGD": 4}
FILL = 0.8
"""Share of the memory that an estimate may fill: the rest is for kernels' workspaces, buffers and fragmentation."""


def rank_bytes(config: Config, args: ModelArgs, layout: Layout) -> tuple[StateBytes, float]:
    """(training state, activations) in bytes of the fullest rank, without fragmentation and workspaces of kernels."""
    topology, training = layout.topology, config.training
    count = count_parameters(args)
    model_cut = topology.tp * topology.pp
    optimizer = OPTIMIZER_BYTES[config.optimizer.name]
    if config.optimizer.name == "SGD" and not config.optimizer.momentum:
        optimizer = 0
    stored, element = ELEMENT[training.dtype], ELEMENT[training.mixed_precision_param]
    shares = partial(
        state_bytes,
        stage=layout.zero_stage,
        param_bytes=stored,
        compute_bytes=element,
        optimizer_bytes=optimizer * stored // 4,
        whole_gradients=_whole_gradients(layout),
    )
    shards, copies = topology.dp_shard * topology.cp, topology.dp * topology.cp > 1 or stored != element
    if args.n_experts and topology.ep * topology.tp > 1:  # the experts of a block are a unit of their own
        rest, unit = count.total - count.routed, count.largest_other_unit
        state = shares(rest // model_cut, unit // topology.tp, shards=shards, working_copy=copies)
        state += shares(
            count.routed // (topology.ep * topology.pp),
            count.routed_layer // topology.ep,
            shards=topology.efsdp,
            working_copy=topology.dp_replicate * topology.efsdp > 1 or stored != element,
        )
    else:
        whole = count.total // model_cut, count.largest_unit // topology.tp
        state = shares(*whole, shards=shards, working_copy=copies)
    tokens = training.local_batch_size * training.seq_len // topology.cp
    blocks = _block_activations(config, args, tokens, element) / model_cut
    head = head_activation_bytes(args, tokens, element, training.loss_chunk_mib * 2**20, topology.tp)
    return state, blocks + head


def _whole_gradients(layout: Layout) -> bool:
    """Stages 0 and 1 reduce after the last micro-batch, pipelines always do."""
    return layout.topology.pp > 1 or (layout.zero_stage <= 1 and layout.accumulation > 1)


def _block_activations(config: Config, args: ModelArgs, tokens: int, element: int) -> float:
    """What all blocks keep, and what the one whose backward runs has computed again."""
    ac = config.activation_checkpoint
    whole, least = (layer_activation_bytes(args, tokens, element, mode) for mode in ("none", "full"))
    if ac.mode == "none":
        return whole * args.n_layers
    if ac.mode == "memory_budget":
        kept = least + ac.memory_budget * (whole - least)
    elif ac.mode == "selective" and ac.selective_ac_option != "op":
        recomputed = len(range(0, args.n_layers, int(ac.selective_ac_option))) / args.n_layers
        kept = recomputed * least + (1 - recomputed) * whole
    else:
        kept = layer_activation_bytes(args, tokens, element, ac.mode)
    return kept * args.n_layers + whole - least


def peak_bytes(config: Config, args: ModelArgs, layout: Layout, device_type: str) -> float:
    """Bytes of the fullest rank on its device at the fullest moment of a step."""
    state, activations = rank_bytes(config, args, layout)
    if config.training.enable_cpu_offload and device_type != "cpu":
        # gradients that are not reduced yet wait on the device
        waiting = state.gradients if _whole_gradients(layout) else 0
        state = replace(state, weights=0, optimizer=0, gradients=waiting)
    if layout.accumulation > 1 or layout.topology.pp > 1:
        return state.total + activations
    # In the only backward, activations go as gradients come
    return state.total + activations - min(state.gradients, activations)


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
    state, activations = rank_bytes(config, args, layout)
    need = peak_bytes(config, args, layout, device_type)
    have, place = device_memory(device_type, ranks_here)
    if need <= have:
        return []
    total = count_parameters(args).total
    each = f"{state.weights / GIB:.1f} weights + {state.gradients / GIB:.1f} gradients + {state.optimizer / GIB:.1f}"
    each += f" optimizer + {(state.gathered + state.buffers) / GIB:.1f} gathered weights and buffers"
    each += f" + {activations / GIB:.1f} activations"
    ranks = ranks_here if device_type == "cpu" else 1
    return [
        f"model.flavor = {config.model.flavor!r} has {total:,} parameters; on {layout.topology} with zero_stage"
        f" {layout.zero_stage} a rank needs at least {need / GIB:.1f} GiB ({each}), in all"
        f" {need * ranks / GIB:.1f} GiB on {place}, which has {have * ranks / GIB:.1f} GiB. Train on more or larger"
        " devices, shard more (a higher zero_stage, more ranks), recompute (activation_checkpoint.mode = 'full'), or"
        " take a smaller model.flavor"
    ]
