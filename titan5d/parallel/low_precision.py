"""Low-precision products: linear layers whose operands are rounded to 8 bits on the fly, through torchao.

    bf16     Y = X W^T                            16-bit operands
    float8   Y = s_X s_W (X / s_X)_8 (W / s_W)_8^T    8-bit operands, a scale for each tensor ("tensorwise") or row
                                                  ("rowwise"); the same in the two products of backward
    mxfp8    the same with a scale, a power of two, for every 32 elements

Weights, gradients, optimizer and checkpoints stay as they are: only products change, so what is saved or exported is an
ordinary model. Converted are the linear layers of the blocks; not the head (its loss needs the precision), not the
router (it decides by differences), not layers whose sizes the kernels cannot take.

Float8 can also be gathered: FSDP2 then moves one byte a weight instead of two, with one scale a tensor, which is why it
goes with tensorwise scales only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titan5d.models.decoder import Decoder

log = logging.getLogger("titan5d")

MULTIPLE = {"float8": 16, "mx": 32}
"""What both sizes of a weight must be multiples of."""


@dataclass(frozen=True)
class LowPrecision:
    """Which linear layers compute in 8 bits, and how.

    Attributes:
        kind: float8 (SM 8.9: Ada, Hopper) or mx (SM 10.0: Blackwell).
        recipe: float8: tensorwise, rowwise or rowwise_with_gw_hp (gradients of weights in bf16).
        skip: layers whose names contain one of these stay as they are.
        emulate: round operands to 8 bits, multiply in the wide type: for devices without such products.
        gather: FSDP2 gathers weights in float8.
        precompute: with `gather`: one all-reduce after each update for the scales of all weights, not one each.
        mx_cast: mx: kernel that casts along dimension 1.
    """

    kind: Literal["float8", "mx"]
    recipe: str = "tensorwise"
    skip: tuple[str, ...] = ()
    emulate: bool = False
    gather: bool = False
    precompute: bool = False
    mx_cast: Literal["triton", "cuda", "torch"] = "triton"


def apply_low_precision(model: Decoder, plan: LowPrecision) -> list[str]:
    """Replaces linear layers of the blocks of `model` (in place, best on the meta device). Returns their names."""
    converted, misfits = [], []
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        if not name.startswith("layers.") or any(part in name for part in plan.skip):
            continue
        if linear.in_features % MULTIPLE[plan.kind] or linear.out_features % MULTIPLE[plan.kind]:
            misfits.append(name)
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _converted(linear, plan))
        converted.append(name)
    how = f"{plan.kind} ({plan.recipe}{', emulated' if plan.emulate else ''})"
    log.info("%s: %d linear layers: %s", how, len(converted), compressed(converted) or "none")
    if misfits:
        multiple = MULTIPLE[plan.kind]
        log.info(
            "%s: sizes that are no multiples of %d, so not converted: %s", how, multiple, compressed(misfits)
        )
    return converted


def _converted(linear: nn.Linear, plan: LowPrecision) -> nn.Linear:
    if plan.kind == "mx":
        return MXLinear(linear, plan)
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = replace(
        Float8LinearConfig.from_recipe_name(plan.recipe),
        enable_fsdp_float8_all_gather=plan.gather,
        emulate=plan.emulate,
    )
    return Float8Linear.from_float(linear, config=config)


class MXLinear(nn.Linear):
    """A linear layer with MXFP8 products; takes over the parameters of `linear`."""

    def __init__(self, linear: nn.Linear, plan: LowPrecision) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.settings = _mx_settings(plan)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out); the product of all leading sizes must be a multiple of 32."""
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm

        out = mx_mm.apply(x, self.weight.to(x.dtype), *self.settings)
        return out if self.bias is None else out + self.bias.to(x.dtype)


def _mx_settings(plan: LowPrecision) -> tuple[Any, ...]:
    """What torchao's product takes behind its operands."""
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernels = KernelPreference.EMULATED if plan.emulate else KernelPreference.AUTO
    rows = MXFP8Dim0CastKernelChoice.TORCH if plan.emulate else MXFP8Dim0CastKernelChoice.TRITON
    columns = MXFP8Dim1CastKernelChoice["TORCH" if plan.emulate else plan.mx_cast.upper()]
    elements = (torch.float8_e4m3fn,) * 3
    return (*elements, 32, kernels, rows, columns, ScaleCalculationMode.RCEIL, False)


def scale_after_updates(model: Decoder, optimizer: torch.optim.Optimizer, plan: LowPrecision | None) -> None:
    """Makes every update end with the scales of all gathered weights, if the plan says so."""
    if plan is None or not plan.precompute:
        return
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))


def compressed(names: Iterable[str]) -> str:
    """layers.0.a, layers.0.b, layers.1.a, layers.1.b -> layers.0-1.{a, b}."""
    layers: dict[int, list[str]] = {}
    for name in names:
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
        assert match is not None
        layers.setdefault(int(match[1]), []).append(match[2])
    runs: list[tuple[int, int, list[str]]] = []
    for number, parts in sorted(layers.items()):
        if runs and runs[-1][1] == number - 1 and runs[-1][2] == parts:
            runs[-1] = (runs[-1][0], number, parts)
        else:
            runs.append((number, number, parts))
    shown = [
        f"layers.{first if first == last else f'{first}-{last}'}.{{{', '.join(parts)}}}"
        for first, last, parts in runs
    ]
    return "; ".join(shown)
