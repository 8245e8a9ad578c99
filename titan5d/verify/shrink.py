"""Any config -> a small case of the same kind, and a sentence for everything that was changed.

Changed is what costs time (sizes, degrees), what has to be set for the proof (fp32, SGD at rate 1, uneven rows,
clipping, accumulation), and what only writes files. Every other key stays: kinds of layers, schedule, ZeRO stage,
recompute, method of context ranks, balance of experts, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import lcm, prod

from titan5d.config.check import Layout, check, context_method
from titan5d.config.load import ConfigError
from titan5d.config.pipeline_plan import PipelinePlan
from titan5d.config.schema import Config, Optimizer
from titan5d.models.args import ModelArgs
from titan5d.models.families import model_args
from titan5d.schedules import catalog, stages
from titan5d.topology import Topology
from titan5d.verify.layouts import MAX_RANKS, Cuts
from titan5d.verify.shrink_model import small_sizes

STEPS = 3
RATE = 1.0
MAX_NORM = 0.1
SEQ_LEN = 32
MOST_LAYERS, MOST_STAGE_RANKS = 16, 4
"""Stages that are written out layer by layer are kept up to this size."""


@dataclass(frozen=True)
class Small:
    """A case small enough for a laptop.

    Attributes:
        config: the small case. Its degrees are those of no layout yet (case.py sets them).
        sizes: the config with the model and row length of the file: rules about sizes are asked of it, too.
        layouts: those asked for, else the file's own one with its degrees cut.
        notes: what was changed, a line each.
    """

    config: Config
    sizes: Config
    layouts: list[Cuts]
    notes: list[str]


def arguments(config: Config) -> ModelArgs:
    """The sizes of a config's model."""
    return model_args(config.model, config.moe, config.debug.moe_force_load_balance)


def shrink(config: Config, asked: Sequence[Cuts] | None = None) -> Small:
    """The small case of a config for the layouts asked for, or for its own one.

    Raises ConfigError if the config cannot be trained as it is.
    """
    args = arguments(config)
    legal = _as_it_is(config, args)
    own = legal.topology
    notes: list[str] = []
    small = deepcopy(config)
    _for_the_proof(small, notes)
    keeps_stages = _pipeline(small, args, own, notes)
    layouts = list(asked) if asked is not None else [Cuts(_cut(small, own, keeps_stages, notes))]
    sizes = deepcopy(small)
    _batch(small, legal.pipeline, layouts, notes)
    sizes.training.local_batch_size = small.training.local_batch_size
    sizes.training.global_batch_size = small.training.global_batch_size
    sizes.parallelism.pipeline_parallel_microbatch_size = small.parallelism.pipeline_parallel_microbatch_size
    _model(small, args, layouts, keeps_stages, notes)
    return Small(small, sizes, layouts, notes)


def _as_it_is(config: Config, args: ModelArgs) -> Layout:
    """What the file comes to; where it leaves the sharding ranks open, with the fewest that are a cut and fit."""
    par = config.parallelism
    others = prod(
        (
            par.data_parallel_replicate_degree,
            par.context_parallel_degree,
            par.tensor_parallel_degree,
            par.pipeline_parallel_degree,
        )
    )
    open_degree = par.data_parallel_shard_degree == -1
    refused: ConfigError | None = None
    for shards in (2, 1, 4, 8, 16, 32, 64, 128) if open_degree else (par.data_parallel_shard_degree,):
        try:
            return check(config, args, others * shards)
        except ConfigError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _for_the_proof(small: Config, notes: list[str]) -> None:
    """Numerics and rule of update that show every factor; nothing that needs a GPU or writes files."""
    training, par = small.training, small.parallelism
    if "bfloat16" in (training.dtype, training.mixed_precision_param):
        notes.append("bfloat16 -> float32: in bf16 rounding would hide what is compared")
    training.dtype = training.mixed_precision_param = "float32"
    if small.model.converters:
        notes.append(
            f"model.converters {small.model.converters} -> none: low precision rounds differently on every cut"
        )
        small.model.converters, small.quantize = [], type(small.quantize)()
    notes.append(
        f"{small.optimizer.name} -> SGD, lr {RATE:g}, no momentum, no decay: Adam hides wrong factors; {STEPS} steps"
    )
    small.optimizer = Optimizer(name="SGD", lr=RATE, weight_decay=0.0, implementation="foreach")
    small.lr_scheduler.warmup_steps, small.lr_scheduler.total_steps = 0, None
    small.lr_scheduler.decay_ratio, small.lr_scheduler.min_lr_factor = 0.0, 1.0
    notes.append(f"max_norm {training.max_norm:g} -> {MAX_NORM:g}, so that it clips")
    training.max_norm, training.steps, training.epochs = MAX_NORM, STEPS, 0
    notes.append(f"data {training.dataset} -> made-up rows: few, many and no targets, documents, padding")
    training.device, training.dataloader.pin_memory = "cpu", False
    if par.enable_async_tensor_parallel:
        notes.append("enable_async_tensor_parallel -> false: it needs CUDA")
        par.enable_async_tensor_parallel = False
    if small.compile.enable and small.compile.backend != "aot_eager":
        notes.append(
            f"compile.backend {small.compile.backend} -> aot_eager: the same graphs, without generated code"
        )
        small.compile.backend = "aot_eager"
    if par.zero_stage is None and par.fsdp_reshard_after_forward == "default":
        notes.append("zero_stage is left open: the most that shards (3; 2 in a pipeline)")
    small.checkpoint.enable = small.checkpoint.create_seed_checkpoint = small.checkpoint.load_only = False
    small.checkpoint.initial_load_path, small.checkpoint.load_step = None, -1
    small.profiling = type(small.profiling)()
    small.metrics = type(small.metrics)(log_freq=1, enable_tensorboard=False, peak_flops=1e12)
    small.debug.log_samples = small.job.print_config = small.model.print_after_conversion = False
    small.job.max_minutes = 0.0


def _pipeline(small: Config, args: ModelArgs, own: Topology, notes: list[str]) -> bool:
    """Whether the stages are written out and small enough to be kept with all their layers."""
    par = small.parallelism
    if par.pipeline_parallel_layers_per_stage is not None:
        notes.append(
            f"pipeline_parallel_layers_per_stage {par.pipeline_parallel_layers_per_stage} -> as many stages a rank as"
            f" {par.pipeline_parallel_schedule} takes"
        )
        par.pipeline_parallel_layers_per_stage = None
    written = par.pipeline_parallel_layout or par.module_fqns_per_model_part
    if not (written or par.pipeline_parallel_schedule_csv):
        return False
    if args.n_layers <= MOST_LAYERS and own.pp <= MOST_STAGE_RANKS:
        return True
    notes.append(
        f"stages or schedule written out for {args.n_layers} layers on {own.pp} ranks -> cut by weight, run by"
        f" {par.pipeline_parallel_schedule}"
    )
    par.pipeline_parallel_layout = par.module_fqns_per_model_part = None
    par.pipeline_parallel_schedule_csv = ""
    return False


def _cut(small: Config, own: Topology, keeps_stages: bool, notes: list[str]) -> Topology:
    """The file's own layout with 2 ranks where it has more, 4 where 2 would take a kind of sharding away."""
    cut = replace(
        own,
        **{axis: min(getattr(own, axis), 2) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")},
        pp=own.pp if keeps_stages else min(own.pp, 2),
    )
    if cut.expert_ranks > cut.dp_shard * cut.cp * cut.tp:  # 2 x 2, of 2 ranks
        axis = next(axis for axis in ("dp_shard", "cp", "tp") if getattr(own, axis) > 2)
        cut = replace(cut, **{axis: 4})
    par = small.parallelism
    if par.zero_reshard_degree is not None:
        notes.append(f"zero_reshard_degree {par.zero_reshard_degree} -> 2 of 4 sharding ranks")
        cut, par.zero_reshard_degree = replace(cut, dp_shard=4, cp=1), 2
    if (
        own.efsdp > 1
        and cut.efsdp == 1
        and cut.expert_ranks > 1
        and 2 * cut.world_size <= MAX_RANKS
        and own.dp_shard >= 2 * cut.dp_shard > 2
    ):
        cut = replace(cut, dp_shard=2 * cut.dp_shard)  # so that experts are shared and sharded
    for axis in ("dp_replicate", "cp", "pp"):
        if cut.world_size > MAX_RANKS:
            notes.append(f"{axis} {getattr(cut, axis)} -> 1: verify runs at most {MAX_RANKS} ranks")
            cut = replace(cut, **{axis: 1})
    if cut != own:
        notes.append(f"layout {own} -> {cut}")
    return cut


def _batch(small: Config, plan: PipelinePlan | None, layouts: Sequence[Cuts], notes: list[str]) -> None:
    """Few short rows that every layout can cut, with at least two micro-batches on each rank.

    plan: of the file itself; a schedule that is read from a table has as many micro-batches as the table.
    """
    training, par, validation = small.training, small.parallelism, small.validation
    before = training.local_batch_size, training.global_batch_size, training.seq_len
    size = par.pipeline_parallel_microbatch_size
    local = min(training.local_batch_size, 2)
    if size > 1:  # rows of a pipeline's micro-batch divide local_batch_size
        par.pipeline_parallel_microbatch_size = 1 if size < training.local_batch_size else local
    step = local * lcm(*(cuts.topology.dp for cuts in layouts))
    least = 2
    if par.pipeline_parallel_expert_parallel_overlap:  # fills the V, so that slots hold two micro-batches
        least = 2 * max(cuts.topology.pp for cuts in layouts)
    rows = step * max(least, -(-8 // step))
    if plan is not None and par.pipeline_parallel_schedule_csv:
        local = par.pipeline_parallel_microbatch_size = plan.microbatch_size
        piped = [cuts.topology.dp for cuts in layouts if cuts.topology.pp == plan.schedule.n_ranks]
        rows = plan.schedule.microbatches * plan.microbatch_size * (piped[0] if piped else 1)
    training.local_batch_size, training.global_batch_size = local, rows
    multiple = lcm(*(2 * cuts.topology.cp * cuts.topology.tp for cuts in layouts))
    if training.seq_len > SEQ_LEN:
        training.seq_len = -(-SEQ_LEN // multiple) * multiple
    validation.seq_len = min(validation.seq_len, training.seq_len)
    validation.local_batch_size, validation.steps, validation.freq = local, -1, STEPS
    training.shuffle = True
    notes.append(
        "local_batch_size {}, global_batch_size {}, seq_len {} -> ".format(*before)
        + f"{local}, {rows}, {training.seq_len}"
    )


def _model(
    small: Config, args: ModelArgs, layouts: Sequence[Cuts], keeps_stages: bool, notes: list[str]
) -> None:
    ulysses = context_method(small) == "ulysses"
    head_ranks = lcm(*(cuts.topology.tp * (cuts.topology.cp if ulysses else 1) for cuts in layouts))
    expert_ranks = lcm(*(cuts.topology.ep for cuts in layouts))
    slices = lcm(*(cuts.topology.etp for cuts in layouts))
    par = small.parallelism
    ends = par.pipeline_parallel_first_stage_less_layers, par.pipeline_parallel_last_stage_less_layers
    chunks = catalog.default_chunks(par.pipeline_parallel_schedule)
    pipelines = {cuts.topology.pp for cuts in layouts} - {1}

    def fits(layers: int) -> bool:
        cuts = [stages.split_by_weight(layers, ranks * chunks, *ends) for ranks in pipelines]
        return not any(stages.problems(cut, layers) for cut in cuts)

    kept = args.n_layers if keeps_stages else None
    sizes = small_sizes(args, kept, head_ranks, expert_ranks, slices, fits)
    for name, size in sizes.items():
        setattr(small.model, name, size)
    changed = ", ".join(f"{name} {getattr(args, name)} -> {size}" for name, size in sizes.items())
    if changed:
        notes.append(f"model {small.model.name} {small.model.flavor}: {changed}")
    ac, layers = small.activation_checkpoint, sizes.get("n_layers", args.n_layers)
    if ac.mode == "selective" and ac.selective_ac_option.isdigit() and int(ac.selective_ac_option) >= layers:
        notes.append(f"selective_ac_option {ac.selective_ac_option} -> 2: every second block")
        ac.selective_ac_option = "2"
