"""The reference on one process against a layout on N: loss, every gradient by name, the norm, weights after SGD.

`reference` and `layout` run the same `train_step` on the same global batches; `assert_equal` compares with the
tolerances of contract 1: loss 1e-6, gradients 1e-5, relative to the largest element of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch._dynamo  # a model on the meta device imports it: once here instead of on each forked rank

from titan5d.config.pipeline_plan import PipelinePlan
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.data.dataset import MicroBatch
from titan5d.launch.local_ranks import run_ranks
from titan5d.models import deepseek_v3
from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.context import ContextParallel
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline import PipelineModel
from titan5d.parallel.pipeline_schedule import Pipeline
from titan5d.parallel.tensor import TensorParallel
from titan5d.schedules import catalog, stages
from titan5d.topology import Topology
from titan5d.train.step import train_step
from titan5d.verify.compare import relative_error
from titan5d.verify.gather import all_stages, whole

TINY = ModelArgs(
    dim=64, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=8, ffn_dim=128, vocab_size=256, max_seq_len=64
)
"""TINY-D of the cases: 180,800 parameters."""
TINY_TIED = replace(TINY, tie_embeddings=True)
TINY_LATENT = deepseek_v3.FLAVORS["debug"].with_overrides(
    dim=64,
    n_layers=3,
    n_heads=4,
    ffn_dim=96,
    vocab_size=256,
    moe_ffn_dim=32,
    kv_lora_rank=32,
    q_lora_rank=40,
)
"""DeepSeek-V3 in small: latent attention, groups of experts, a dense first layer."""
UNEQUAL = (3, 61, 1, 40, 64, 2, 7, 30)
"""Valid targets of the eight rows of a batch: a mean of means is far from the mean."""


@dataclass(frozen=True)
class Case:
    """One way to execute a step. `rows` are valid targets by row of the global batch."""

    topology: Topology = field(default_factory=Topology)
    stage: int = 3
    accumulation: int = 1
    args: ModelArgs = TINY
    valid: tuple[int, ...] = UNEQUAL
    seq_len: int = 64
    documents: bool = False
    max_norm: float = 0.0
    steps: int = 1
    lr: float = 1.0
    recompute: str = "none"
    selective: str = "op"
    compile: bool = False
    backend: str = "aot_eager"  # of the compiler
    only_target: int | None = None
    context: ContextParallel = field(default_factory=ContextParallel)
    reshard_degree: int | None = None
    dtype: torch.dtype = torch.float32
    tensor: TensorParallel | None = None
    schedule: str = "1F1B"  # of pipeline ranks, in micro-batches of `microbatch_size` rows
    chunks: int | None = None
    microbatch_size: int = 1
    overlap: bool = False  # of the all-to-alls of a DualPipeV slot
    layout: str = ""
    norm_scale: float = 1.0  # of all norm weights, before the first step
    cpu_offload: bool = False
    padding: int = 0  # places without a token at the end of every row; with documents
    prepare: Callable[[Decoder], None] | None = None  # changes the model before the first step, alike on all ranks


@dataclass
class Outcome:
    losses: list[float]
    max_losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]  # of the first step, clipped
    weights: dict[str, torch.Tensor]


def global_batch(case: Case, step: int) -> list[torch.Tensor]:
    """(tokens, labels, positions, document ids) of one step, (rows, seq_len) each; a function of the step alone."""
    generator = torch.Generator().manual_seed(100 + step)
    rows, seq = len(case.valid), case.seq_len
    tokens = torch.randint(case.args.vocab_size, (rows, seq), generator=generator)
    labels = torch.randint(case.args.vocab_size, (rows, seq), generator=generator)
    for row, valid in enumerate(case.valid):
        keep = torch.randperm(seq, generator=generator)[: min(valid, seq)]
        if case.only_target is not None:
            keep = torch.tensor([case.only_target])
        mask = torch.ones(seq, dtype=torch.bool)
        mask[keep] = False
        labels[row, mask] = -100
    ends = (torch.rand(rows, seq, generator=generator) < 0.1).int()
    ids = torch.cumsum(ends, dim=1).int() if case.documents else torch.zeros(rows, seq, dtype=torch.int32)
    if case.padding:
        ids[:, -case.padding :], labels[:, -case.padding :] = -1, -100
    starts = torch.ones(rows, seq, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    index = torch.arange(seq).expand(rows, seq)
    positions = index - torch.where(starts, index, 0).cummax(dim=1).values
    return [tokens, labels, positions, ids]


def micro_batches(case: Case, step: int, dp_rank: int) -> list[MicroBatch]:
    """This data-parallel rank's part of a step, in `accumulation` pieces."""
    tensors = [part.chunk(case.topology.dp)[dp_rank] for part in global_batch(case, step)]
    pieces = zip(*(tensor.chunk(case.accumulation) for tensor in tensors), strict=True)
    return [
        MicroBatch(
            tokens, labels, positions, ids if case.documents else None, [], int((labels != -100).sum())
        )
        for tokens, labels, positions, ids in pieces
    ]


def run_case(case: Case) -> Outcome:
    """Runs on the ranks of the current process group; the outcome is whole (gathered) on every rank."""
    device = torch.device("cpu")
    meshes = Meshes(case.topology, "cpu", has_experts=case.args.n_experts > 0)
    data = DataParallel(case.stage, case.reshard_degree, param_dtype=case.dtype, cpu_offload=case.cpu_offload)
    recompute = ActivationCheckpoint(mode=case.recompute, selective_ac_option=case.selective)  # type: ignore[arg-type]
    compile = Compile(enable=case.compile, backend=case.backend)
    model = build_parallel_model(
        case.args,
        meshes,
        data,
        recompute,
        compile,
        torch.float32,
        seed=5,
        device=device,
        tensor=case.tensor,
        context=case.context,
        pipeline=pipeline_plan(case),
    )
    pipeline = build_pipeline(case, meshes, model)
    _scale_norms(model, case.norm_scale)
    if case.prepare is not None:
        with torch.no_grad():
            case.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    outcome = Outcome([], [], [], {}, {})

    def keep_gradients(*_: object) -> None:
        if not outcome.gradients:
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            outcome.gradients = all_stages(whole(grads), meshes.group("pp"), case.args.tie_embeddings)

    optimizer.register_step_pre_hook(keep_gradients)
    for step in range(case.steps):
        batches = micro_batches(case, step, meshes.dp_rank)
        result = train_step(model, optimizer, batches, meshes, case.stage, case.max_norm, device, pipeline)
        outcome.losses.append(result.loss)
        outcome.max_losses.append(result.max_loss)
        outcome.norms.append(result.grad_norm)
    saved = dict(model.named_parameters())
    for name, router in model.routers().items():  # buffers that are saved
        saved |= {f"layers.{name}.router.bias": router.bias, f"layers.{name}.router.load": router.load.float()}
    outcome.weights = all_stages(whole(saved), meshes.group("pp"), case.args.tie_embeddings)
    return outcome


def pipeline_plan(case: Case) -> PipelinePlan | None:
    ranks = case.topology.pp
    if ranks == 1:
        return None
    chunks = case.chunks or catalog.default_chunks(case.schedule)
    rows = len(case.valid) // case.topology.dp
    cut = stages.parse_layout(case.layout) if case.layout else None
    cut = cut or stages.split_by_weight(case.args.n_layers, ranks * chunks, 1, 1)
    assert not stages.problems(cut, case.args.n_layers)
    table = catalog.build(case.schedule, ranks, len(cut) // ranks, rows // case.microbatch_size)
    return PipelinePlan(table, cut, case.microbatch_size, case.overlap)


def build_pipeline(case: Case, meshes: Meshes, model: torch.nn.Module) -> Pipeline | None:
    plan = pipeline_plan(case)
    if plan is None:
        return None
    assert isinstance(model, PipelineModel) and meshes.pipeline is not None
    sequence_parallel = (case.tensor or TensorParallel()).sequence_parallel
    sequence_ranks = case.topology.cp * (case.topology.tp if sequence_parallel else 1)
    device = torch.device("cpu")
    return Pipeline(model, plan, meshes.pipeline, sequence_ranks, case.dtype, device, case.stage)


@torch.no_grad()
def _scale_norms(model: torch.nn.Module, scale: float) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.mul_(scale)


def reference(case: Case) -> Outcome:
    """The same model and batches on one process, all rows at once; computed once for all layouts of a session."""
    alone = replace(
        case,
        topology=Topology(),
        stage=0,
        accumulation=1,
        recompute="none",
        compile=False,
        backend="aot_eager",
        reshard_degree=None,
        cpu_offload=False,
        tensor=None,
        context=ContextParallel(),
        schedule="1F1B",
        chunks=None,
        microbatch_size=1,
        overlap=False,
        layout="",
    )
    if alone not in _REFERENCES:
        _REFERENCES[alone] = run_ranks(run_case, 1, alone)[0]
    return _REFERENCES[alone]


_REFERENCES: dict[Case, Outcome] = {}


def layout(case: Case, timeout: float = 60) -> list[Outcome]:
    """The case on its ranks; one outcome a rank."""
    return run_ranks(run_case, case.topology.world_size, case, timeout=timeout)


def assert_parity(case: Case, loss: float = 1e-6, gradient: float = 1e-5, timeout: float = 60) -> None:
    """Every rank of the layout has the reference's loss, norm, gradients and weights."""
    expected = reference(case)
    for rank, found in enumerate(layout(case, timeout)):
        close(found.losses, expected.losses, loss, f"rank {rank} loss")
        close(found.max_losses, expected.max_losses, loss, f"rank {rank} max_loss")
        close(found.norms, expected.norms, gradient, f"rank {rank} gradient norm")
        for kind in ("gradients", "weights"):
            ours, theirs = getattr(found, kind), getattr(expected, kind)
            assert ours.keys() == theirs.keys()
            for name in theirs:
                if ".router." in name and not name.endswith("weight"):  # made of whole numbers
                    assert torch.equal(ours[name], theirs[name]), f"rank {rank} {name}"
                error = relative_error(ours[name], theirs[name])
                assert error <= gradient, (
                    f"rank {rank} {kind} {name}: relative error {error:.2e} > {gradient:g}"
                )


def close(found: Sequence[float], expected: Sequence[float], tolerance: float, what: str) -> None:
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert abs(ours - theirs) <= tolerance * max(abs(theirs), 1e-30), (
            f"{what} at step {step}: {ours} != {theirs}"
        )
