"""ALL rules that involve more than one key, or a key and the world the run is started in (contract 7).

Every rule adds a sentence that names keys and numbers and says what would work; all of them are shown at once, before
any process group exists. Rules that hold in any layout are in check_values.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan5d.config.check_expert import expert_problems
from titan5d.config.check_overlap import overlap_problems
from titan5d.config.check_precision import layout_precision_problems, precision_problems
from titan5d.config.check_values import value_problems
from titan5d.config.load import ConfigError
from titan5d.config.pipeline_plan import PipelinePlan, pipeline_plan
from titan5d.config.schema import Config
from titan5d.config.unavailable import unavailable
from titan5d.schedules.table import ScheduleError
from titan5d.topology import Topology, fill_degree

if TYPE_CHECKING:
    from titan5d.models.args import ModelArgs


@dataclass(frozen=True)
class Layout:
    """What the keys of a run come to in a world of a given size.

    Attributes:
        topology: degrees and ranks.
        zero_stage: 0..3.
        global_batch_size: rows per optimizer step over all ranks.
        accumulation: micro-batches per optimizer step on each rank.
        seed: of weights and data order.
        pipeline: how the layers are cut; None with one pipeline rank.
    """

    topology: Topology
    zero_stage: int
    global_batch_size: int
    accumulation: int
    seed: int
    pipeline: PipelinePlan | None = None


def check(config: Config, args: ModelArgs, world_size: int) -> Layout:
    """Raises ConfigError with everything that cannot work; otherwise returns what the keys come to."""
    problems = unavailable(config)
    problems += args.problems()
    problems += value_problems(config)
    problems += precision_problems(config)
    par = config.parallelism
    topology, plan = Topology(), None
    try:
        topology = fill_degree(
            world_size,
            par.data_parallel_replicate_degree,
            par.data_parallel_shard_degree,
            par.context_parallel_degree,
            par.tensor_parallel_degree,
            par.pipeline_parallel_degree,
            par.expert_parallel_degree,
            par.expert_tensor_parallel_degree,
        )
    except ValueError as error:
        problems.append(str(error))
    else:
        problems += _batch(config, topology)
        problems += _zero(config, topology)
        problems += _context(config, args, topology)
        problems += _tensor(config, args, topology)
        problems += expert_problems(config, args, topology)
        wrong = _pipeline(config, args, topology)
        problems += wrong
        if topology.pp > 1 and not wrong:
            plan = _plan(config, args, topology)
        problems += overlap_problems(config, topology, plan)
        problems += layout_precision_problems(
            config, topology, zero_stage(config, topology), plan is not None and plan.splits_backward
        )
    if problems:
        raise ConfigError(problems)
    global_batch = _global_batch(config, topology)
    return Layout(
        topology=topology,
        zero_stage=zero_stage(config, topology),
        global_batch_size=global_batch,
        accumulation=global_batch // (config.training.local_batch_size * topology.dp),
        seed=config.training.seed if config.debug.seed is None else config.debug.seed,
        pipeline=plan,
    )


def zero_stage(config: Config, topology: Topology) -> int:
    """The stage asked for; without one 3, the most a run can shard, 2 in a pipeline, and 0 where there is nothing to
    shard over."""
    par = config.parallelism
    if par.zero_stage is not None:
        return par.zero_stage
    if topology.dp_shard * topology.cp == 1:
        return 0
    if par.fsdp_reshard_after_forward == "always":
        return 3
    # A pipeline would gather the parameters of stage 3 anew for every micro-batch
    return 2 if par.fsdp_reshard_after_forward == "never" or topology.pp > 1 else 3


def leaves_zero_stage_open(config: Config, topology: Topology) -> bool:
    """Whether the run takes the least stage that fits (plan.fits.least_zero_stage) instead of a stage asked for."""
    par = config.parallelism
    asked = par.zero_stage, par.zero_reshard_degree
    return (
        asked == (None, None)
        and par.fsdp_reshard_after_forward == "default"
        and topology.dp_shard * topology.cp > 1
    )


def _global_batch(config: Config, topology: Topology) -> int:
    training = config.training
    return (
        training.local_batch_size * topology.dp
        if training.global_batch_size == -1
        else training.global_batch_size
    )


def _batch(config: Config, topology: Topology) -> list[str]:
    training, dp = config.training, topology.dp
    problems = []
    step = training.local_batch_size * dp
    if training.global_batch_size != -1 and step > 0 and training.global_batch_size % step:
        below = training.global_batch_size // step * step
        near = f"{below} or {below + step}" if below else step
        problems.append(
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of local_batch_size"
            f" {training.local_batch_size} x {dp} data-parallel ranks = {step}; use {near}"
        )
    if config.validation.enable and config.validation.seq_len > config.training.seq_len:
        problems.append(
            f"validation.seq_len = {config.validation.seq_len} is longer than training.seq_len = {training.seq_len};"
            " use at most the training length"
        )
    return problems


def _zero(config: Config, topology: Topology) -> list[str]:
    par, problems = config.parallelism, []
    shards = topology.dp_shard * topology.cp
    wanted = {"always": 3, "never": 2}.get(par.fsdp_reshard_after_forward)
    if par.zero_stage is not None and wanted is not None and par.zero_stage != wanted:
        problems.append(
            f"parallelism.fsdp_reshard_after_forward = {par.fsdp_reshard_after_forward!r} means zero_stage {wanted},"
            f" but zero_stage = {par.zero_stage} is set; keep one of the two"
        )
    if par.zero_stage and shards == 1 and topology.dp_replicate > 1:
        problems.append(
            f"parallelism.zero_stage = {par.zero_stage} has nothing to shard over: data_parallel_shard_degree x"
            f" context_parallel_degree = 1 and data_parallel_replicate_degree = {topology.dp_replicate}; set zero_stage"
            " = 0, or a shard degree above 1"
        )
    if par.zero_stage == 0 and topology.dp_replicate > 1 and shards > 1:
        problems.append(
            f"parallelism.zero_stage = 0 keeps everything on every rank, but data_parallel_shard_degree ="
            f" {topology.dp_shard}; set data_parallel_replicate_degree = {topology.dp} and data_parallel_shard_degree ="
            " 1, or a zero_stage of 1 to 3 for HSDP"
        )
    degree = par.zero_reshard_degree
    if degree is not None:
        if zero_stage(config, topology) != 3:
            problems.append(
                f"parallelism.zero_reshard_degree = {degree} belongs to zero_stage 3 (parameters freed after forward),"
                f" this run has stage {zero_stage(config, topology)}; set zero_stage = 3, or leave the degree out"
            )
        if topology.world_size != shards:
            problems.append(
                f"parallelism.zero_reshard_degree = {degree} regroups parameters that all ranks share, and of"
                f" {topology} only {shards} of {topology.world_size} ranks do; leave it out, or set the replicate,"
                " tensor and pipeline degrees to 1"
            )
        elif degree < 2 or shards % degree or degree >= shards:
            fitting = [n for n in range(2, shards) if shards % n == 0]
            hint = f"use one of {', '.join(map(str, fitting))}" if fitting else "leave it out"
            problems.append(
                f"parallelism.zero_reshard_degree = {degree} must divide the {shards} ranks that shard parameters and"
                f" be smaller than them; {hint}"
            )
    return problems


def _tensor(config: Config, args: ModelArgs, topology: Topology) -> list[str]:
    par, tp, problems = config.parallelism, topology.tp, []
    if par.enable_async_tensor_parallel and (tp == 1 or not par.sequence_parallel):
        problems.append(
            "parallelism.enable_async_tensor_parallel = true hides the gathers of sequence parallelism under products,"
            f" but this run has tensor_parallel_degree = {tp} and sequence_parallel ="
            f" {str(par.sequence_parallel).lower()}; set a degree of at least 2 and sequence_parallel = true, or leave"
            " it out"
        )
    if tp == 1:
        return problems
    if args.n_experts and not par.sequence_parallel:
        problems.append(
            f"parallelism.sequence_parallel = false with tensor_parallel_degree = {tp}: all {tp} ranks would hold the"
            " same tokens and route them to the same experts, once each; with experts,"
            " sequence_parallel = true is needed"
        )
    if misfits := _tensor_misfits(args, tp):
        fitting = [str(n) for n in range(1, args.n_heads + 1) if not _tensor_misfits(args, n)]
        use = f"degrees that fit this model: {', '.join(fitting)}"
        problems += [f"parallelism.tensor_parallel_degree = {tp} {misfit}; {use}" for misfit in misfits]
    if par.sequence_parallel and topology.cp == 1:  # with context parallelism _context says it
        lengths = {"training.seq_len": config.training.seq_len}
        if config.validation.enable:
            lengths["validation.seq_len"] = config.validation.seq_len
        for name, length in lengths.items():
            if length % tp:
                below = length // tp * tp
                near = f"{below} or {below + tp}" if below else tp
                problems.append(
                    f"{name} = {length} does not divide over parallelism.tensor_parallel_degree = {tp}, which"
                    f" sequence_parallel needs; use {near}, or sequence_parallel = false"
                )
    return problems


def _tensor_misfits(args: ModelArgs, tp: int) -> list[str]:
    """Why the model's sizes cannot be shared by tp ranks: what follows "this degree ..."."""
    widths = {}
    if not all(args.has_experts(layer) for layer in range(args.n_layers)):
        widths["model.ffn_dim"] = args.ffn_dim
    if args.n_shared_experts:
        widths["the shared experts' width model.n_shared_experts x moe_ffn_dim"] = (
            args.n_shared_experts * args.moe_ffn_dim
        )
    misfits = [f"does not divide {name} = {width}, which ranks share" for name, width in widths.items() if width % tp]
    if args.n_heads % tp:
        misfits.append(f"does not divide model.n_heads = {args.n_heads}, and a rank computes whole heads")
    elif args.n_kv_heads % tp and tp % args.n_kv_heads:
        misfits.append(
            f"and model.n_kv_heads = {args.n_kv_heads}: neither divides the other, so ranks would need parts of heads"
        )
    if (tp - 1) * -(-args.vocab_size // tp) >= args.vocab_size:
        misfits.append(f"leaves ranks without a row of model.vocab_size = {args.vocab_size}")
    return misfits


def device_problems(config: Config, topology: Topology, device_type: str, ranks_per_node: int) -> list[str]:
    """What cannot work on this kind of device (cpu, cuda), with so many ranks on a node."""
    if not config.parallelism.enable_async_tensor_parallel:
        return []
    if device_type != "cuda":
        return [
            "parallelism.enable_async_tensor_parallel = true needs CUDA devices that reach each other's memory, and"
            f" this run is on {device_type}; leave it out (the result is the same)"
        ]
    if topology.tp > ranks_per_node:
        return [
            "parallelism.enable_async_tensor_parallel = true works between devices that reach each other's memory,"
            f" but tensor_parallel_degree = {topology.tp} and a node has {ranks_per_node} ranks; use a degree of at"
            f" most {ranks_per_node}, or leave it out"
        ]
    return []


def pipeline_notes(layout: Layout) -> list[str]:
    """What works with pipeline ranks, but is worth a word in the log."""
    plan, topology = layout.pipeline, layout.topology
    if plan is None:
        return []
    notes, microbatches = [], plan.schedule.microbatches
    if layout.zero_stage == 3:
        notes.append(
            f"zero_stage 3 with pipeline_parallel_degree = {topology.pp}: parameters are gathered for each of the"
            f" {microbatches} micro-batches, forward and backward, {2 * microbatches} times a step; zero_stage 2 or 1"
            " gathers them once"
        )
    if microbatches < topology.pp:
        notes.append(
            f"{microbatches} micro-batches a step do not fill {topology.pp} pipeline ranks, some always wait; a larger"
            " training.global_batch_size or a smaller pipeline_parallel_microbatch_size makes more"
        )
    return notes


def context_method(config: Config) -> Literal["ring", "allgather", "ulysses"]:
    """The method asked for, in our words or TorchTitan's."""
    par = config.parallelism
    if par.context_parallel_method is not None:
        return par.context_parallel_method
    return "allgather" if par.context_parallel_rotate_method == "allgather" else "ring"


def _context(config: Config, args: ModelArgs, topology: Topology) -> list[str]:
    par, problems = config.parallelism, []
    method, rotate = par.context_parallel_method, par.context_parallel_rotate_method
    if method is not None and rotate is not None and method != {"alltoall": "ring"}.get(rotate, rotate):
        problems.append(
            f"parallelism.context_parallel_rotate_method = {rotate!r} contradicts context_parallel_method ="
            f" {method!r}; keep one of the two"
        )
    cp, tp = topology.cp, topology.tp
    if cp == 1:
        return problems
    chunks = cp if par.context_parallel_load_balancer in (None, "none") else 2 * cp
    multiple = chunks * (tp if par.sequence_parallel else 1)
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable:
        lengths["validation.seq_len"] = config.validation.seq_len
    for name, length in lengths.items():
        if length % multiple:
            below = length // multiple * multiple
            what = f"context_parallel_degree = {cp} ({chunks} chunks)"
            what += f" and tensor_parallel_degree = {tp} with sequence_parallel" if multiple > chunks else ""
            near = f"{below} or {below + multiple}" if below else multiple
            problems.append(
                f"{name} = {length} does not divide over {what}; use a multiple of {multiple}, such as {near}"
            )
    if context_method(config) == "ulysses" and args.n_heads // tp % cp:
        problems.append(
            f"parallelism.context_parallel_method = 'ulysses' divides the {args.n_heads // tp} query heads of a rank"
            f" over context_parallel_degree = {cp} ranks; use a degree that divides them, or 'ring'"
        )
    return problems


def _plan(config: Config, args: ModelArgs, topology: Topology) -> PipelinePlan:
    rows = _global_batch(config, topology) // topology.dp
    return pipeline_plan(config, args.n_layers, topology.pp, rows)


def _pipeline(config: Config, args: ModelArgs, topology: Topology) -> list[str]:
    if topology.pp == 1 and config.profiling.pipeline_trace:
        return [
            "profiling.pipeline_trace = true measures the schedule of a pipeline, but pipeline_parallel_degree = 1;"
            " leave it out, or set a degree of 2 or more"
        ]
    if topology.pp == 1:
        return []
    if args.n_layers < 1 or config.training.local_batch_size < 1 or _batch(config, topology):
        return []  # reported already, and nothing can be counted
    size, local = config.parallelism.pipeline_parallel_microbatch_size, config.training.local_batch_size
    if args.balance.aux_loss_kind == "micro_batch" and args.balance.aux_loss_coefficient and size != local:
        return [
            "moe.aux_loss_kind = 'micro_batch' counts the load of experts over training.local_batch_size ="
            f" {local} rows, but a micro-batch of a pipeline has parallelism.pipeline_parallel_microbatch_size ="
            f" {size}, so another loss would be learned; set it to {local}, or use aux_loss_kind = 'sequence' or"
            " 'global_batch'"
        ]
    try:
        _plan(config, args, topology)
    except ScheduleError as error:
        return error.problems
    return []
