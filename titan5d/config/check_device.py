"""Rules of what a device must offer for the keys that need it; beside check.py, and called before ranks meet."""

from __future__ import annotations

import importlib.util

from titan5d.config.check_precision import FLOAT8, MX
from titan5d.config.schema import Config


def feature_problems(
    config: Config, device_type: str, capability: tuple[int, int] | None = None
) -> list[str]:
    """What is asked for and this kind of device (cpu, cuda) does not have. capability: of a CUDA device."""
    problems = []
    problems += _attention(config, device_type, capability)
    linear, converters = config.quantize.linear, config.model.converters
    if FLOAT8 in converters and not linear.float8.emulate and capability is not None and capability < (8, 9):
        problems.append(
            f'model.converters = ["{FLOAT8}"] needs float8 products, which CUDA devices have from capability 8.9'
            f" on (Ada, Hopper), and this one has {capability[0]}.{capability[1]}; leave it out, or set"
            " quantize.linear.float8.emulate = true to try the numerics"
        )
    real_mx = MX in converters and linear.mx.recipe_name != "mxfp8_emulated"
    if real_mx and (capability is None or capability < (10, 0)):
        has = (
            f"this run is on {device_type}"
            if capability is None
            else f"this one has {'.'.join(map(str, capability))}"
        )
        problems.append(
            f'model.converters = ["{MX}"] needs MXFP8 products, which CUDA devices have from capability 10.0 on'
            f' (Blackwell), and {has}; leave it out, or set quantize.linear.mx.recipe_name = "mxfp8_emulated" to'
            " try the numerics"
        )
    if config.profiling.enable_memory_snapshot and device_type != "cuda":
        problems.append(
            "profiling.enable_memory_snapshot = true records the CUDA allocator, and this run is on"
            f" {device_type}, which has none; leave it out (memory_peak_gib in metrics.jsonl is measured everywhere)"
        )
    return problems


def _attention(config: Config, device_type: str, capability: tuple[int, int] | None) -> list[str]:
    """model.attention_backend, where it names kernels."""
    backend = config.model.attention_backend
    key, problems = f"model.attention_backend = {backend!r}", []
    if backend != "auto" and config.parallelism.context_parallel_degree > 1:
        problems.append(
            f"{key} with parallelism.context_parallel_degree = {config.parallelism.context_parallel_degree}: context"
            " ranks attend block by block, with flash-attn where it is installed, else with torch's own kernels; leave"
            " it at 'auto'"
        )
    if backend in ("flash_attn", "sdpa_efficient", "sdpa_cudnn") and device_type != "cuda":
        problems.append(f"{key} needs a CUDA device, and this run is on {device_type}; use 'auto' or 'sdpa'")
    if backend == "sdpa_flash" and config.training.document_mask:
        problems.append(
            f"{key} takes no mask, and training.document_mask = true needs one; use 'flash_attn' or 'auto', or set"
            " document_mask = false"
        )
    if backend == "flash_attn":
        if importlib.util.find_spec("flash_attn") is None:
            problems.append(
                f"{key} needs the flash-attn package, which is not installed: pip install -e .[gpu]"
            )
        if config.training.mixed_precision_param == "float32":
            problems.append(
                f"{key} computes in 16 bits, but training.mixed_precision_param = 'float32'; use 'sdpa'"
            )
        if capability is not None and capability < (8, 0):
            problems.append(
                f"{key} needs CUDA capability 8.0, and this device has {'.'.join(map(str, capability))}"
            )
    return problems
