"""One layout of one model as plain numbers: what memory, traffic and time are computed from.

Made from a checked config (`case_of`) or, by the search, from numbers that stand for a config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from titan5d.config.check import Layout, context_method
from titan5d.config.schema import Config
from titan5d.models.args import ModelArgs
from titan5d.schedules import stages as cutting
from titan5d.schedules.stages import Stages
from titan5d.schedules.table import Schedule
from titan5d.topology import Topology

ELEMENT = {"float32": 4, "bfloat16": 2}
OPTIMIZER_BYTES = {"AdamW": 8, "Adam": 8, "Muon": 4, "SGD": 4}
MomentKind = Literal["alike", "int8", "float8", "int4", "muon"]


class Narrow(NamedTuple):
    """Of one narrow moment: bytes of a value; values that share an fp32 scale; numbers of its fp32 table."""

    value: float
    block: int
    table: int


NARROW = {"int8": Narrow(1, 256, 256), "float8": Narrow(1, 256, 0), "int4": Narrow(0.5, 128, 16)}


@dataclass(frozen=True)
class Recompute:
    """What backward computes again.

    Attributes:
        mode: of a block that is recomputed, `selective` (all but products) or `full`; `none`.
        share: of the blocks, 0 to 1.
    """

    mode: Literal["none", "selective", "full"]
    share: float = 1.0

    @staticmethod
    def of(config: Config, n_layers: int) -> Recompute:
        """What the keys of [activation_checkpoint] come to. memory_budget lies between none and full."""
        ac = config.activation_checkpoint
        if ac.mode == "none":
            return Recompute("none", 0.0)
        if ac.mode == "memory_budget":
            return Recompute("full", 1 - ac.memory_budget)
        if ac.mode == "selective" and ac.selective_ac_option != "op":
            every = int(ac.selective_ac_option)
            return Recompute("full", len(range(0, n_layers, every)) / n_layers)
        return Recompute(ac.mode)


@dataclass(frozen=True)
class Case:
    """The numbers.

    Attributes:
        args, topology, zero_stage: as in the run.
        seq_len: tokens of a row; rows: of one micro-batch on one rank.
        microbatches: of one optimizer step on one rank, one after the other or through the pipeline.
        stages: parts of the model by pipeline stage; schedule: the table, None with one pipeline rank.
        loss_chunk: largest piece of fp32 logits, bytes; 0 = all at once.
        stored, element: bytes of a parameter as stored, as computed with; optimizer: of its optimizer state.
        moment_kind: alike = every parameter has `optimizer` bytes; else see optimizer_state.py.
    """

    args: ModelArgs
    topology: Topology
    zero_stage: int
    seq_len: int
    rows: int
    microbatches: int
    stages: Stages
    schedule: Schedule | None = None
    recompute: Recompute = Recompute("none", 0.0)
    sequence_parallel: bool = True
    loss_parallel: bool = True
    regather_input: bool = True
    async_tensor: bool = False
    context_method: Literal["ring", "allgather", "ulysses"] = "ring"
    balanced_context: bool = True
    reshard_degree: int | None = None
    loss_chunk: float = 64 * 2**20
    stored: int = 4
    element: int = 2
    optimizer: float = 8
    moment_kind: MomentKind = "alike"
    compiled: bool = False
    offload: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch that a rank holds (of all tensor ranks together)."""
        return self.rows * self.seq_len / self.topology.cp

    @property
    def stream_tokens(self) -> float:
        """Tokens of which a rank holds the residual stream."""
        return self.tokens / self.topology.tp if self.sequence_parallel else self.tokens

    @property
    def global_tokens(self) -> float:
        """Tokens of one optimizer step, over all ranks."""
        return self.rows * self.seq_len * self.microbatches * self.topology.dp

    @property
    def shards(self) -> int:
        """Ranks that share the parameters of everything but cut experts."""
        return self.topology.dp_shard * self.topology.cp

    @property
    def experts_apart(self) -> bool:
        """Whether the experts of a block are a unit of their own."""
        return bool(self.args.n_experts) and self.topology.expert_ranks * self.topology.tp > 1

    @property
    def rounds_experts(self) -> bool:
        """Whether experts that are whole on a rank are rounded where they are used: FSDP2 has no part in them."""
        topology = self.topology
        whole = topology.efsdp * topology.tp * topology.pp == 1 and self.stored != self.element
        return self.experts_apart and whole and not self.offload

    @property
    def whole_gradients(self) -> bool:
        """Whether ranks sum their gradients over micro-batches before they are reduced (data.py, pipeline_data.py)."""
        return self.topology.pp > 1 or (self.zero_stage <= 1 and self.microbatches > 1)

    @property
    def working_copy(self) -> bool:
        """Whether computing uses a copy of all stored parameters: gathered, or rounded once (data.py)."""
        once = self.stored != self.element and not self.rounds_layers
        return self._gathers or once or self.offload

    @property
    def rounds_layers(self) -> bool:
        """Whether each layer rounds its weights as it uses them; its backward needs what was rounded (data.py)."""
        one_by_one = self.topology.tp * self.topology.pp == 1 and not self._gathers and not self.offload
        return one_by_one and self.stored != self.element

    @property
    def _gathers(self) -> bool:
        ranks = max(self.shards, self.topology.efsdp if self.experts_apart else 1)
        return self.zero_stage > 0 and ranks > 1

    @property
    def n_ranks(self) -> int:
        """Pipeline ranks."""
        return self.topology.pp

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages on a pipeline rank, lowest first."""
        return self._stages_by_rank[rank]

    @cached_property
    def _stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        return ((0,),) if self.schedule is None else _held_by_rank(self.schedule.rank_of_stage)

    @property
    def layers_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the layers in each stage."""
        return _layers(self.stages)

    @property
    def blocks_of_stage(self) -> tuple[tuple[int, int], ...]:
        """Of each stage how many blocks it has: (without, with experts)."""
        return _blocks(self.stages, self.args.n_dense_layers if self.args.n_experts else self.args.n_layers)

    @cached_property
    def dense_args(self) -> ModelArgs:
        """Sizes of a block without experts."""
        if not self.args.n_experts:
            return self.args
        nothing = dict.fromkeys(
            ("n_experts", "top_k", "moe_ffn_dim", "n_shared_experts", "n_dense_layers"), 0
        )
        return replace(self.args, **nothing)  # type: ignore[arg-type]

    @cached_property
    def expert_args(self) -> ModelArgs:
        """Sizes of a block with experts."""
        return replace(self.args, n_dense_layers=0)


# The search asks for these of thousands of cases, which have few ways to cut the model.
@lru_cache(maxsize=256)
def _held_by_rank(rank_of_stage: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    held: list[list[int]] = [[] for _ in range(max(rank_of_stage) + 1)]
    for stage, rank in enumerate(rank_of_stage):
        held[rank].append(stage)
    return tuple(tuple(stages) for stages in held)


@lru_cache(maxsize=256)
def _layers(stages: Stages) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(int(name.partition(".")[2]) for name in stage if name.startswith("layers.")) for stage in stages
    )


@lru_cache(maxsize=256)
def _blocks(stages: Stages, n_dense: int) -> tuple[tuple[int, int], ...]:
    dense = [sum(layer < n_dense for layer in layers) for layers in _layers(stages)]
    return tuple((count, len(layers) - count) for count, layers in zip(dense, _layers(stages), strict=True))


def case_of(config: Config, args: ModelArgs, layout: Layout) -> Case:
    """The case of a checked config."""
    training, par = config.training, config.parallelism
    plan = layout.pipeline
    chosen = config.optimizer
    optimizer: float = OPTIMIZER_BYTES[chosen.name] * ELEMENT[training.dtype] // 4
    if chosen.name == "SGD" and not chosen.momentum:
        optimizer = 0
    if chosen.state_dtype != "float32":
        narrow = NARROW[chosen.state_dtype]
        optimizer = 2 * (narrow.value + 4 / narrow.block)
    rows, microbatches = training.local_batch_size, layout.accumulation
    if plan is not None:
        rows, microbatches = plan.microbatch_size, plan.schedule.microbatches
    full = config.activation_checkpoint.mode == "full"
    return Case(
        args=args,
        topology=layout.topology,
        zero_stage=layout.zero_stage,
        seq_len=training.seq_len,
        rows=rows,
        microbatches=microbatches,
        stages=(cutting.model_parts(args.n_layers),) if plan is None else plan.stages,
        schedule=None if plan is None else plan.schedule,
        recompute=Recompute.of(config, args.n_layers),
        sequence_parallel=par.sequence_parallel,
        loss_parallel=not par.disable_loss_parallel,
        regather_input=par.tensor_parallel_regather_input and par.sequence_parallel and not full,
        async_tensor=par.enable_async_tensor_parallel,
        context_method=context_method(config),
        balanced_context=par.context_parallel_load_balancer == "headtail",
        reshard_degree=par.zero_reshard_degree,
        loss_chunk=training.loss_chunk_mib * 2**20,
        stored=ELEMENT[training.dtype],
        element=ELEMENT[training.mixed_precision_param],
        optimizer=optimizer,
        moment_kind=_moment_kind(chosen.name, chosen.state_dtype),
        compiled=config.compile.enable,
        offload=training.enable_cpu_offload,
    )


def _moment_kind(name: str, state_dtype: Literal["float32", "int8", "float8", "int4"]) -> MomentKind:
    if state_dtype != "float32":
        return state_dtype
    return "muon" if name == "Muon" else "alike"
