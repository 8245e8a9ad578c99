"""The keys of how a run is executed: cuts, recompute, compile, precision, communication, diagnosis.

Changing any of these must not change what is learned (see schema.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from titan5d.config.section import Section


@dataclass
class Profiling(Section):
    """Traces for a closer look."""

    enable_profiling: bool = False
    """Write Kineto traces (docs/profiling.md): one file a rank, every profile_freq steps."""
    save_traces_folder: str = "profile_traces"
    """Folder inside the run folder."""
    profile_freq: int = 10
    """One trace, and one snapshot, every this many steps; at least profiler_warmup + profiler_active."""
    profiler_active: int = 1
    """Steps recorded in one trace."""
    profiler_warmup: int = 3
    """Steps of warmup before a trace."""
    enable_memory_snapshot: bool = False
    """Write snapshots of the CUDA allocator every profile_freq steps, and when memory runs out. Refused on a CPU."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder inside the run folder."""
    pipeline_trace: bool = False
    """At every logged step: when each action of the pipeline's schedule really ran, as JSON and as a picture in
    <save_traces_folder>/pipeline/step-N/, and the measured bubble as the metric pipeline_bubble."""


@dataclass
class Parallelism(Section):
    """The cuts. The degrees multiply to the number of ranks."""

    data_parallel_replicate_degree: int = 1
    """Copies of the model (HSDP when the shard degree is above 1 too)."""
    data_parallel_shard_degree: int = -1
    """Ranks over which training state is sharded; -1 = all that are left."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """0 replicate everything, 1 shard optimizer state, 2 gradients too, 3 parameters too (docs/data_parallel.md).
    Default: the least of 1, 2, 3 whose estimate fits in 80% of a rank's memory, or what fsdp_reshard_after_forward
    asks for."""
    zero_reshard_degree: int | None = None
    """zero_stage 3: after forward keep parameters sharded over this many neighbouring ranks only, instead of all:
    the backward gather then stays inside a node (ZeRO++ hpZ). Divides the sharding ranks, which must be all ranks."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """TorchTitan's spelling: always = zero_stage 3, never = zero_stage 2."""
    tensor_parallel_degree: int = 1
    """Ranks that share one matrix product."""
    sequence_parallel: bool = True
    """With tensor parallelism: norms and residuals on a slice of the sequence."""
    disable_loss_parallel: bool = False
    """With tensor parallelism: gather the logits instead of a vocabulary-parallel loss."""
    tensor_parallel_regather_input: bool = True
    """With sequence_parallel: gather the input of q, k, v and of gate, up again in backward instead of keeping it:
    activations of 1/degree, for two more gathers a block. Not used with activation_checkpoint.mode = full, which
    gathers again anyway."""
    enable_async_tensor_parallel: bool = False
    """With sequence_parallel: run the products in pieces while others travel (CUDA, ranks of one node)."""
    pipeline_parallel_degree: int = 1
    """Ranks that share the stack of layers."""
    pipeline_parallel_layout: str | None = None
    """The stages, written out: `E,t*3|t*4|t*4|t*3,N,H` = bars between stages, E embedding, t layers, N norm, H head
    (docs/pipeline_parallel.md). Default: cut evenly by weight."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """The same as a list of module names per stage: tok_embeddings, layers.N, norm, output."""
    pipeline_parallel_first_stage_less_layers: int = 1
    """How many layers the embedding counts as, so how many fewer the first stage gets."""
    pipeline_parallel_last_stage_less_layers: int = 1
    """How many layers norm and head count as, so how many fewer the last stage gets."""
    pipeline_parallel_layers_per_stage: int | None = None
    """The most layers in one stage, embedding and head counted; says how many stages there are. Default: one stage a
    rank, two with the schedules that take several."""
    pipeline_parallel_schedule: str = "1F1B"
    """GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV."""
    pipeline_parallel_schedule_csv: str | None = ""
    """A schedule of one's own: the path of a table (docs/schedules.md, "CSV files")."""
    pipeline_parallel_microbatch_size: int = 1
    """Rows per pipeline micro-batch; divides training.local_batch_size. All rows of an optimizer step on a rank go
    through one pass of the schedule."""
    pipeline_parallel_expert_parallel_overlap: bool = False
    """DualPipeV: in a slot with a forward and a backward, rows of one micro-batch travel to experts and back while the
    other computes. The result is the same; worth it where expert ranks are joined by slow links."""
    context_parallel_degree: int = 1
    """Ranks that share one sequence."""
    context_parallel_method: Literal["ring", "allgather", "ulysses"] | None = None
    """How attention sees the whole sequence: ring (keys and values travel, overlapped with compute), allgather (they
    are gathered first), ulysses (heads are exchanged for sequence). Default: ring."""
    context_parallel_load_balancer: Literal["headtail", "none"] | None = "headtail"
    """headtail = zig-zag, every rank the same causal work."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] | None = None
    """TorchTitan's spelling of context_parallel_method: allgather, or alltoall for ring."""
    expert_parallel_degree: int = 1
    """Ranks that share the experts. They are no ranks of their own: divides data_parallel_shard_degree x
    context_parallel_degree x tensor_parallel_degree, and the number of experts (docs/expert_parallel.md)."""
    expert_tensor_parallel_degree: int = 1
    """Ranks that share one expert, each a slice of its hidden width (model.moe_ffn_dim). No ranks of their own either:
    this degree x expert_parallel_degree divides those ranks. Rows go to all slices, so it costs that many times the
    traffic: for few, wide experts (docs/expert_parallel.md)."""
    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"
    """How tokens reach their experts: standard = all-to-all."""


@dataclass
class ActivationCheckpoint(Section):
    """What forward keeps for backward and what is computed again."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """none keeps all; full keeps one tensor a block; selective keeps what is dear to compute; memory_budget lets
    the compiler choose."""
    selective_ac_option: str = "op"
    """selective: `op` = drop attention and norms, keep matrix products; a number n = recompute every n-th block."""
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(
        default_factory=lambda: ["moe.router.gate"]
    )
    """selective, op: matrix products of modules with these names are recomputed."""
    early_stop: bool = True
    """Stop recomputing once the last needed tensor is there."""
    memory_budget: float = 0.5
    """memory_budget: share of the activations kept (0 = full recompute, 1 = none)."""
    visualize_memory_budget_pareto: bool = False
    """memory_budget: write the compiler's cost curve."""
    preserve_rng_state: bool = True
    """Recompute with the random numbers of the first forward."""
    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes of recomputed tensors with the first ones."""
    debug: bool = False
    """Verbose errors when recomputation differs."""


@dataclass
class Compile(Section):
    """torch.compile, block by block."""

    enable: bool = False
    """Compile."""
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    """What to compile: model (every block), loss."""
    backend: str = "inductor"
    """Backend of torch.compile."""


@dataclass
class Float8Linear(Section):
    """Float8 products through torchao."""

    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers the converted weights in float8: half the bytes. Tensorwise only, zero_stage 1 to 3."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """After each update one all-reduce for the scales of all gathered weights, not one for each."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """torchao's recipe: a scale a tensor, a scale a row, or that with weight gradients in bf16. Default: tensorwise."""
    filter_fqns: list[str] = field(default_factory=list)
    """Linear layers whose names contain one of these are not converted. Head and routers never are."""
    emulate: bool = False
    """Round operands to float8 and multiply in the wide type: on devices without float8 products."""


@dataclass
class MXLinear(Section):
    """Microscaled float8 products (Blackwell)."""

    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    """Kernel of the cast along dim 1."""
    recipe_name: str = "mxfp8_cublas"
    """mxfp8_cublas, or mxfp8_emulated on any device."""
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])
    """Linear layers whose names contain one of these are not converted. Head and routers never are."""


@dataclass
class Float8GroupedMM(Section):
    """Float8 grouped products of experts."""

    fqns: list[str] | str = field(default_factory=list)
    """Modules to convert."""


@dataclass
class MXGroupedMM(Section):
    """Microscaled grouped products of experts."""

    recipe_name: Literal["mxfp8"] = "mxfp8"
    """torchao recipe."""
    fqns: list[str] | str = field(default_factory=list)
    """Modules to convert."""


@dataclass
class QuantizeLinear(Section):
    """Low-precision linear layers."""

    float8: Float8Linear = field(default_factory=Float8Linear)
    """Float8."""
    mx: MXLinear = field(default_factory=MXLinear)
    """MXFP8."""


@dataclass
class QuantizeGroupedMM(Section):
    """Low-precision experts."""

    float8: Float8GroupedMM = field(default_factory=Float8GroupedMM)
    """Float8."""
    mx: MXGroupedMM = field(default_factory=MXGroupedMM)
    """MXFP8."""


@dataclass
class Quantize(Section):
    """Low-precision products (docs/precision.md, the [ao] extra); switched on through model.converters."""

    linear: QuantizeLinear = field(default_factory=QuantizeLinear)
    """Linear layers."""
    grouped_mm: QuantizeGroupedMM = field(default_factory=QuantizeGroupedMM)
    """Grouped products of experts."""


@dataclass
class Comm(Section):
    """Process groups."""

    init_timeout_seconds: int = 300
    """Time limit for the ranks to find each other and for the first step."""
    train_timeout_seconds: int = 100
    """Time limit of every collective after the first step. When it is over, the watchdog says which rank did not come
    and where it stands, and ends all ranks (docs/troubleshooting.md)."""
    files_timeout_seconds: int = 3600
    """How long ranks wait for one that reads or writes a checkpoint, the slowest disk's time."""
    preflight: bool = False
    """Before training, measure the links of each axis and the ranks' matrix products, about a second. That all ranks
    have the same code, libraries and config is checked at every start."""
    trace_buf_size: int = 20000
    """Collectives that the flight recorder of a rank keeps; 0 = no recorder and no watchdog."""
    save_traces_folder: str = "comm_traces"
    """Folder inside the run folder for the records of a run that hung or failed; `titan5d diagnose` reads them."""
    save_traces_file_prefix: str = "rank_"
    """File name prefix of a rank's record."""
    mode: Literal["default", "fake_backend", "local_tensor"] = "default"
    """TorchTitan's modes without real communication; use `titan5d dryrun`. Only default."""


@dataclass
class MemoryEstimation(Section):
    """TorchTitan's estimator. Refused: `titan5d plan` and `titan5d dryrun` do this."""

    enable: bool = False
    """Only false."""
    disable_fake_mode: bool = False
    """Only false."""


@dataclass
class FaultTolerance(Section):
    """torchft. Refused: restarts with resharding checkpoints do this."""

    enable: bool = False
    """Only false."""
    process_group: str = "gloo"
    """Belongs to enable."""
    process_group_timeout_ms: int = 10000
    """Belongs to enable."""
    replica_id: int = 0
    """Belongs to enable."""
    group_size: int = 0
    """Belongs to enable."""
    min_replica_size: int = 1
    """Belongs to enable."""
    semi_sync_method: str | None = None
    """Belongs to enable."""


@dataclass
class Experimental(Section):
    """TorchTitan's import hooks. Refused: nothing is loaded by name here."""

    custom_import: str = ""
    """Only empty."""
    custom_args_module: str = ""
    """Only empty."""


@dataclass
class Debug(Section):
    """Looking closer, and making runs repeatable."""

    seed: int | None = None
    """TorchTitan's place of the seed; wins over training.seed when set."""
    deterministic: bool = False
    """Only deterministic kernels: the same layout gives the same bits."""
    deterministic_warn_only: bool = False
    """Warn instead of stopping where a kernel has no deterministic form."""
    moe_force_load_balance: bool = False
    """Route by the place in the row, evenly, whatever the router says: for benchmarks."""
    audit_gradients: bool = False
    """After every backward, check each gradient on each mesh axis: equal where it is declared replicated, and the sum
    of what the ranks made (docs/profiling.md). Ends the run, naming what is wrong. Costs memory and time."""
    log_samples: bool = False
    """Write the sample ids each rank consumed to samples-rank*.jsonl."""
