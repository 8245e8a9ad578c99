"""From the keys of a run to what executes it: the cut model and, if its layers are cut, what runs the stages.

The trainer and the dry run both build by these functions, so what is planned is what is trained.
"""

from __future__ import annotations

import importlib.util
import logging

import torch

from titan5d.config.check import Layout, context_method
from titan5d.config.check_precision import FLOAT8, MX
from titan5d.config.schema import Config
from titan5d.models.args import ModelArgs
from titan5d.models.attention_backends import Backend, choose_backend
from titan5d.models.decoder import Decoder
from titan5d.parallel.apply import CutModel, cut_model, fill
from titan5d.parallel.context import ContextParallel
from titan5d.parallel.data import DataParallel
from titan5d.parallel.low_precision import LowPrecision
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.pipeline import PipelineModel
from titan5d.parallel.pipeline_schedule import Pipeline
from titan5d.parallel.tensor import TensorParallel

log = logging.getLogger("titan5d")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def data_parallel(config: Config, layout: Layout) -> DataParallel:
    """How the batch axis is executed."""
    return DataParallel(
        stage=layout.zero_stage,
        reshard_degree=config.parallelism.zero_reshard_degree,
        param_dtype=DTYPES[config.training.mixed_precision_param],
        reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
        cpu_offload=config.training.enable_cpu_offload,
    )


def tensor_parallel(config: Config) -> TensorParallel:
    """How the tensor axis is executed."""
    return TensorParallel(
        sequence_parallel=config.parallelism.sequence_parallel,
        loss_parallel=not config.parallelism.disable_loss_parallel,
        regather_input=(
            config.parallelism.tensor_parallel_regather_input and config.activation_checkpoint.mode != "full"
        ),
        overlap=config.parallelism.enable_async_tensor_parallel,
    )


def context_parallel(config: Config) -> ContextParallel:
    """How the context axis is executed."""
    return ContextParallel(
        method=context_method(config),
        load_balancer=config.parallelism.context_parallel_load_balancer or "none",
    )


def low_precision(config: Config) -> LowPrecision | None:
    """Which products are computed in 8 bits; None = none of them."""
    linear = config.quantize.linear
    if FLOAT8 in config.model.converters:
        return LowPrecision(
            "float8",
            linear.float8.recipe_name or "tensorwise",
            tuple(linear.float8.filter_fqns),
            linear.float8.emulate,
            linear.float8.enable_fsdp_float8_all_gather,
            linear.float8.precompute_float8_dynamic_scale_for_fsdp,
        )
    if MX in config.model.converters:
        return LowPrecision(
            "mx",
            linear.mx.recipe_name,
            tuple(linear.mx.filter_fqns),
            emulate=linear.mx.recipe_name == "mxfp8_emulated",
            mx_cast=linear.mx.mxfp8_dim1_cast_kernel_choice,
        )
    return None


def attention_backend(config: Config, args: ModelArgs, layout: Layout, device_type: str) -> Backend:
    """The kernels of attention, chosen and said once."""
    if layout.topology.cp > 1:  # context.py brings its own
        return "sdpa"
    capability = torch.cuda.get_device_capability() if device_type == "cuda" else None
    dtype = DTYPES[config.training.mixed_precision_param]
    installed = importlib.util.find_spec("flash_attn") is not None
    backend, why = choose_backend(config.model.attention_backend, capability, dtype, args.head_dim, installed)
    log.info("attention: %s (%s)", backend, why)
    return backend


def build_model(
    config: Config, args: ModelArgs, layout: Layout, meshes: Meshes, device: torch.device
) -> Decoder:
    """This rank's part of the model, filled with its part of the initial weights."""
    cut = build_without_memory(config, args, layout, meshes)
    return fill(cut, layout.seed, device, config.training.enable_cpu_offload)


def build_without_memory(config: Config, args: ModelArgs, layout: Layout, meshes: Meshes) -> CutModel:
    """The same on the meta device."""
    return cut_model(
        args,
        meshes,
        data_parallel(config, layout),
        config.activation_checkpoint,
        config.compile,
        DTYPES[config.training.dtype],
        tensor_parallel(config),
        context_parallel(config),
        layout.pipeline,
        low_precision(config),
        attention_backend(config, args, layout, meshes.device_type),
    )


def build_pipeline(
    config: Config, layout: Layout, meshes: Meshes, model: Decoder, device: torch.device
) -> Pipeline | None:
    """What runs the stages of this rank, if the layers are cut."""
    plan, groups = layout.pipeline, meshes.pipeline
    if plan is None or groups is None:
        return None
    assert isinstance(model, PipelineModel)
    topology = layout.topology
    tensor_ranks = topology.tp if config.parallelism.sequence_parallel else 1
    dtype = DTYPES[config.training.mixed_precision_param]
    return Pipeline(model, plan, groups, topology.cp * tensor_ranks, dtype, device, layout.zero_stage)
