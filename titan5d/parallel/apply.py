"""The order in which cuts are applied to a single-device model. Only this file knows it.

    pipeline split -> low precision -> tensor -> expert -> context -> recompute -> compile -> data

Recompute before compile, so that the compiler sees what is kept; data last, since its hooks must stay outside of
every graph. The model is cut on the meta device, then given memory, then filled: no rank ever holds the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titan5d.config.pipeline_plan import PipelinePlan
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.models.attention_backends import Backend, set_attention_backend
from titan5d.models.decoder import Decoder, ModelArgs
from titan5d.parallel.compile import apply_compile
from titan5d.parallel.context import ContextParallel, apply_context_parallel
from titan5d.parallel.data import DataParallel, apply_data_parallel
from titan5d.parallel.deferred_weights import WeightGradientStore, defer_weight_gradients
from titan5d.parallel.expert import apply_expert_parallel
from titan5d.parallel.initialize import initialize
from titan5d.parallel.low_precision import LowPrecision, apply_low_precision
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline import PipelineModel, build_stage
from titan5d.parallel.recompute import apply_recompute
from titan5d.parallel.tensor import TensorParallel, apply_tensor_parallel
from titan5d.schedules.stages import model_parts


@dataclass(frozen=True)
class CutModel:
    """This rank's part of the model, cut, on the meta device: no memory yet.

    Attributes:
        stages: the pipeline stages of this rank by number; one, 0, without pipeline ranks.
        is_pipeline: whether the layers are cut.
        store: where weight gradients wait, if the schedule puts them off.
    """

    stages: dict[int, Decoder]
    is_pipeline: bool
    store: WeightGradientStore | None

    def model(self) -> Decoder:
        """The part as one module; a PipelineModel where the layers are cut."""
        return PipelineModel(self.stages, self.store) if self.is_pipeline else self.stages[0]


def cut_model(
    args: ModelArgs,
    meshes: Meshes,
    data: DataParallel,
    recompute: ActivationCheckpoint,
    compile: Compile,
    dtype: torch.dtype,
    tensor: TensorParallel | None = None,
    context: ContextParallel | None = None,
    pipeline: PipelinePlan | None = None,
    low_precision: LowPrecision | None = None,
    attention: Backend = "sdpa",
) -> CutModel:
    """This rank's part of the model on the meta device. The arguments are those of `build_parallel_model`."""
    if pipeline is None:
        every_part = model_parts(args.n_layers)
        stages, store = {0: every_part}, None
    else:
        mine = pipeline.schedule.stages_of_rank(meshes.coordinates["pp"])
        stages = {stage: pipeline.stages[stage] for stage in mine}
        store = WeightGradientStore() if pipeline.splits_backward else None
    cut = {}
    for stage, names in stages.items():
        with torch.device("meta"):
            model = build_stage(args, names).to(dtype)
        parallelize(model, meshes, data, recompute, compile, tensor, context, store, low_precision, attention)
        cut[stage] = model
    return CutModel(cut, pipeline is not None, store)


def allocate(model: Decoder, device: torch.device, cpu_offload: bool) -> None:
    """Gives a cut model memory on `device`, or, where the sharded state is offloaded, on the host; its buffers their
    values."""
    model.to_empty(device="cpu" if cpu_offload else device)
    if cpu_offload:
        for router in model.routers().values():  # whole on every rank, so never offloaded
            router.to(device)
    model.init_buffers(device)


def build_parallel_model(
    args: ModelArgs,
    meshes: Meshes,
    data: DataParallel,
    recompute: ActivationCheckpoint,
    compile: Compile,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
    tensor: TensorParallel | None = None,
    context: ContextParallel | None = None,
    pipeline: PipelinePlan | None = None,
    low_precision: LowPrecision | None = None,
    attention: Backend = "sdpa",
) -> Decoder:
    """This rank's part of the model, on `device`, filled with its part of the initial weights.

    Args:
        dtype: storage type of parameters, gradients and optimizer state.
        tensor, context: how these axes are executed; None = with their defaults.
        pipeline: needed with several pipeline ranks; the model is then a PipelineModel.
        low_precision: which products are computed in 8 bits; None = none of them.
        attention: the kernels; with context ranks not used.
    """
    cut = cut_model(
        args, meshes, data, recompute, compile, dtype, tensor, context, pipeline, low_precision, attention
    )
    return fill(cut, seed, device, data.cpu_offload)


def fill(cut: CutModel, seed: int, device: torch.device, cpu_offload: bool) -> Decoder:
    """Gives a cut model memory and its part of the initial weights."""
    for stage in cut.stages.values():
        allocate(stage, device, cpu_offload)
        initialize(stage, seed)
    return cut.model()


def parallelize(
    model: Decoder,
    meshes: Meshes,
    data: DataParallel,
    recompute: ActivationCheckpoint,
    compile: Compile,
    tensor: TensorParallel | None = None,
    context: ContextParallel | None = None,
    weight_gradients: WeightGradientStore | None = None,
    low_precision: LowPrecision | None = None,
    attention: Backend = "sdpa",
) -> None:
    """Cuts `model` (on the meta device) in place for this rank. weight_gradients: where they wait, if they may."""
    if low_precision is not None:
        apply_low_precision(model, low_precision)
    set_attention_backend(model, attention)
    if meshes.topology.tp > 1:
        apply_tensor_parallel(model, meshes.parameters["tp"], tensor or TensorParallel())
    if model.args.n_experts:
        apply_expert_parallel(model, meshes, (context or ContextParallel()).load_balancer)
    if meshes.topology.cp > 1:
        apply_context_parallel(model, meshes.group("cp"), context or ContextParallel())
    if weight_gradients is not None:
        defer_weight_gradients(model, weight_gradients, compile.enable)
    experts_are_cut = meshes.experts is not None
    apply_recompute(model, recompute, compile.enable, experts_are_cut)
    if compile.enable:
        apply_compile(model, compile.components, compile.backend, experts_are_cut)
    rows, experts = meshes.data_parallel(data.stage), meshes.expert_data_parallel(data.stage)
    is_cut = meshes.topology.pp * meshes.topology.tp > 1
    apply_data_parallel(model, rows, data, experts, rounds_once=is_cut)
