"""The order in which cuts are applied to a single-device model. Only this file knows it.

    pipeline split -> tensor -> expert -> context -> recompute -> compile -> data

Recompute before compile, so that the compiler sees what is kept; data last, since its hooks must stay outside of
every graph. The model is cut on the meta device, then given memory, then filled: no rank ever holds the whole.
"""

from __future__ import annotations

import torch

from titan5d.config.pipeline_plan import PipelinePlan
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.models.decoder import Decoder, ModelArgs
from titan5d.parallel.compile import apply_compile
from titan5d.parallel.context import ContextParallel, apply_context_parallel
from titan5d.parallel.data import DataParallel, apply_data_parallel
from titan5d.parallel.deferred_weights import WeightGradientStore, defer_weight_gradients
from titan5d.parallel.expert import apply_expert_parallel
from titan5d.parallel.initialize import initialize
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline import PipelineModel, build_stage
from titan5d.parallel.recompute import apply_recompute
from titan5d.parallel.tensor import TensorParallel, apply_tensor_parallel
from titan5d.schedules.stages import model_parts


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
) -> Decoder:
    """This rank's part of the model, on `device`, filled with its part of the initial weights.

    Args:
        dtype: storage type of parameters, gradients and optimizer state.
        tensor, context: how these axes are executed; None = with their defaults.
        pipeline: needed with several pipeline ranks; the model is then a PipelineModel.
    """
    if pipeline is None:
        every_part = model_parts(args.n_layers)
        stages, store = {0: every_part}, None
    else:
        mine = pipeline.schedule.stages_of_rank(meshes.coordinates["pp"])
        stages = {stage: pipeline.stages[stage] for stage in mine}
        store = WeightGradientStore() if pipeline.splits_backward else None
    built = {}
    for stage, names in stages.items():
        with torch.device("meta"):
            model = build_stage(args, names).to(dtype)
        parallelize(model, meshes, data, recompute, compile, tensor, context, store)
        model.to_empty(device="cpu" if data.cpu_offload else device)
        for router in model.routers().values():  # whole on every rank, so never offloaded
            router.to(device)
        initialize(model, seed)
        model.init_buffers(device)
        built[stage] = model
    return built[0] if pipeline is None else PipelineModel(built, store)


def parallelize(
    model: Decoder,
    meshes: Meshes,
    data: DataParallel,
    recompute: ActivationCheckpoint,
    compile: Compile,
    tensor: TensorParallel | None = None,
    context: ContextParallel | None = None,
    weight_gradients: WeightGradientStore | None = None,
) -> None:
    """Cuts `model` (on the meta device) in place for this rank. weight_gradients: where they wait, if they may."""
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
    topology = meshes.topology
    expert_mesh = meshes.expert_data_parallel(data.stage)
    ranks = max(topology.dp * topology.cp, 1 if expert_mesh is None else expert_mesh.size())
    # One rank that computes in the type it stores has nothing to shard, gather or cast
    if ranks > 1 or data.param_dtype != next(model.parameters()).dtype or data.cpu_offload:
        apply_data_parallel(model, meshes.data_parallel(data.stage), data, expert_mesh)
