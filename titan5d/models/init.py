"""Initial weights from a counter: element i of a parameter is a pure function of (seed, parameter name, i).

Every shard fills itself without the rest, so one device, any sharding and any pipeline split start bitwise equal:

    (seed, name) --sha256--> two 64-bit keys
    i --multiply, add key, mix, xor key, mix--> 64 random bits --> uniform in (0, 1) --> inverse normal CDF --> * std

The mixing is the finaliser of SplitMix64 (Steele et al. 2014; constants of Stafford's variant 13) with a second key in
its middle. The inverse CDF is Acklam's rational approximation (relative error 1.2e-9). Only integer operations and
correctly rounded float64 + - * / sqrt are used, each as a kernel of its own: nothing promises that `log` or `cos` have
the same bits in a vectorised loop and its scalar tail, in another version of a library or on another device.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder

CHUNK = 2**16
"""Elements drawn at a time on a CPU: the temporaries, about six of 8 bytes an element, stay in a core's cache."""
CHUNK_ACCELERATOR = 2**21
"""Elsewhere: large enough that launching kernels costs little."""


@dataclass(frozen=True)
class InitSpec:
    """How one parameter starts.

    Attributes:
        kind: `normal`, `trunc_normal` (a normal distribution conditioned on [a, b]), `ones` or `zeros`.
        std: standard deviation of the normal distribution, before truncation.
        a, b: bounds of trunc_normal, in units of std, within -5..5.
        drawn_as: name to draw under instead of the parameter's own: two names of one tensor (tied embeddings) get
            equal values wherever they live.
    """

    kind: Literal["normal", "trunc_normal", "ones", "zeros"]
    std: float = 1.0
    a: float = -3.0
    b: float = 3.0
    drawn_as: str | None = None

    def __post_init__(self) -> None:
        if not -5 <= self.a < self.b <= 5:
            raise ValueError(
                f"InitSpec: a = {self.a}, b = {self.b}, but in units of std -5 <= a < b <= 5 holds"
            )
        if self.std < 0:
            raise ValueError(f"InitSpec: std = {self.std} is negative")


def init_specs(args: ModelArgs) -> dict[str, InitSpec]:
    """How each parameter of `Decoder(args)` starts, by name.

    Projections and routers: normal(0.02) cut at 3 std; those that write into the residual stream (wo, w2)
    0.02 / sqrt(2 (l + 1)) in layer l, so that the stream's variance does not grow with depth (GPT-2's rule, by layer).
    Embedding: std 1. Head: dim ** -0.5 / 4, so that logits start small and the loss at about ln(vocab_size). A tied
    matrix serves both: dim ** -0.5. Norms 1, biases 0.
    """
    ones = InitSpec("ones")
    head_std = args.dim**-0.5
    specs = {"norm.weight": ones}
    if args.tie_embeddings:
        specs["tok_embeddings.weight"] = InitSpec("normal", head_std)
        specs["output.weight"] = InitSpec("normal", head_std, drawn_as="tok_embeddings.weight")
    else:
        specs["tok_embeddings.weight"] = InitSpec("normal", 1.0)
        specs["output.weight"] = InitSpec("trunc_normal", head_std / 4)
    for n in range(args.n_layers):
        into_stream = InitSpec("trunc_normal", 0.02 / math.sqrt(2 * (n + 1)))
        block = {"attention_norm.weight": ones, "ffn_norm.weight": ones}
        block |= {f"attention.{name}": spec for name, spec in _attention_specs(args, into_stream).items()}
        feed_forward = _expert_specs(args, into_stream) if args.has_experts(n) else _swiglu_specs(into_stream)
        block |= {f"feed_forward.{name}": spec for name, spec in feed_forward.items()}
        specs |= {f"layers.{n}.{name}": spec for name, spec in block.items()}
    return specs


def _attention_specs(args: ModelArgs, into_stream: InitSpec) -> dict[str, InitSpec]:
    norms: tuple[str, ...] = ("q_norm", "k_norm") if args.qk_norm else ()
    inward: tuple[str, ...] = ("wq", "wk", "wv")
    biased: tuple[str, ...] = (*inward, "wo")
    if args.kv_lora_rank:
        queries = ("wq_a", "wq_b") if args.q_lora_rank else ("wq",)
        inward, norms = (*queries, "wkv_a", "wkv_b"), ("q_norm", "kv_norm") if args.q_lora_rank else ("kv_norm",)
        biased = ("wq_a", "wkv_a", "wo") if args.q_lora_rank else ("wkv_a", "wo")
    specs = {f"{name}.weight": InitSpec("trunc_normal", 0.02) for name in inward}
    specs["wo.weight"] = into_stream
    specs |= {f"{name}.weight": InitSpec("ones") for name in norms}
    if args.attention_bias:
        specs |= {f"{name}.bias": InitSpec("zeros") for name in biased}
    return specs


def _swiglu_specs(into_stream: InitSpec, suffix: str = ".weight") -> dict[str, InitSpec]:
    linear = InitSpec("trunc_normal", 0.02)
    return {f"w1{suffix}": linear, f"w2{suffix}": into_stream, f"w3{suffix}": linear}


def _expert_specs(args: ModelArgs, into_stream: InitSpec) -> dict[str, InitSpec]:
    specs = {"router.weight": InitSpec("trunc_normal", 0.02)}
    specs |= {f"experts.{name}": spec for name, spec in _swiglu_specs(into_stream, suffix="").items()}
    if args.n_shared_experts:
        specs |= {f"shared_experts.{name}": spec for name, spec in _swiglu_specs(into_stream).items()}
    return specs


@torch.no_grad()
def init_weights_(model: Decoder, seed: int) -> None:
    """Fills all parameters of a model on one device, in place."""
    specs = init_specs(model.args)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        offsets = (0,) * len(shape)
        parameter.copy_(fill_slice(seed, name, shape, offsets, shape, specs[name], parameter.device))


def fill_slice(
    seed: int,
    name: str,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    local_shape: Sequence[int],
    spec: InitSpec,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The block `[offset : offset + size]` along each dimension of a parameter's initial value, fp32, (*local_shape).

    Bitwise the same numbers as that block of the whole parameter. Memory beyond the result: about 3 MB on a CPU.

    Raises ValueError if the block reaches outside `global_shape`.
    """
    global_shape, offsets, local_shape = tuple(global_shape), tuple(offsets), tuple(local_shape)
    inside = len(global_shape) == len(offsets) == len(local_shape) and all(
        min(offset, size) >= 0 and offset + size <= whole
        for whole, offset, size in zip(global_shape, offsets, local_shape, strict=True)
    )
    if not inside:
        raise ValueError(
            f"{name}: a block {local_shape} at {offsets} is not inside a tensor of {global_shape}"
        )
    if spec.kind == "ones":
        return torch.ones(local_shape, device=device)
    if spec.kind == "zeros":
        return torch.zeros(local_shape, device=device)
    keys = _keys(seed, spec.drawn_as or name)
    out = torch.empty(local_shape, dtype=torch.float32, device=device)
    flat = out.view(-1)
    for start, stop, index in _index_chunks(global_shape, offsets, local_shape, out.device):
        flat[start:stop] = _normal(_hash(index, keys), spec)
    return out


def _keys(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    first, second = struct.unpack_from("<qq", digest)
    return first, second


def _index_chunks(
    global_shape: tuple[int, ...],
    offsets: tuple[int, ...],
    local_shape: tuple[int, ...],
    device: torch.device,
) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, index): elements start..stop of the flattened block are elements `index` of the flattened whole.

    `index` may be overwritten.
    """
    # Dimensions that are not cut join the last one that is: `run` elements lie side by side in the whole, too.
    axis = len(global_shape)
    while axis > 0 and global_shape[axis - 1 :] == local_shape[axis - 1 :]:
        axis -= 1
    axis = max(axis - 1, 0)
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(len(global_shape))]
    run, runs = math.prod(local_shape[axis:]), math.prod(local_shape[:axis])
    if run * runs == 0:
        return
    base = offsets[axis] * strides[axis] if global_shape else 0
    chunk = CHUNK if device.type == "cpu" else CHUNK_ACCELERATOR
    step = torch.arange(min(run, chunk), device=device)
    together = max(1, chunk // run)  # short runs are drawn together, long ones piece by piece
    for first in range(0, runs, together):
        rest = torch.arange(first, min(first + together, runs), device=device)
        begin = torch.full_like(rest, base)
        for dim in reversed(range(axis)):
            begin += (rest % local_shape[dim] + offsets[dim]) * strides[dim]
            rest = rest // local_shape[dim]
        for inside in range(0, run, chunk):
            index = (begin[:, None] + inside) + step[: run - inside]  # (runs, elements)
            start = first * run + inside
            yield start, start + index.numel(), index.view(-1)


def _hash(index: Tensor, keys: tuple[int, int]) -> Tensor:
    """64 random bits for each int64 index, in place."""
    z = index.mul_(_signed(0x9E3779B97F4A7C15)).add_(keys[0])
    z ^= _shift_right(z, 30)
    z *= _signed(0xBF58476D1CE4E5B9)
    z ^= keys[1]
    z ^= _shift_right(z, 27)
    z *= _signed(0x94D049BB133111EB)
    z ^= _shift_right(z, 31)
    return z


def _signed(bits: int) -> int:
    """The int64 with the same 64 bits."""
    return bits - 2**64 if bits >= 2**63 else bits


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: zeros come in from the left, also for negative numbers."""
    return (z >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _normal(bits: Tensor, spec: InitSpec) -> Tensor:
    """Random bits (n,) -> float64 samples (n,)."""
    # 52 bits -> the middles of 2^52 equal cells of (-1/2, 1/2), all exact in float64
    centred = (bits >> 12).double().add_(0.5).mul_(2.0**-52)
    if spec.kind == "normal":
        return _inverse_cdf(centred).mul_(spec.std)
    low, high = normal_cdf(spec.a), normal_cdf(spec.b)
    centred.mul_(high - low).add_((low + high) / 2 - 0.5)
    return _inverse_cdf(centred).clamp_(spec.a, spec.b).mul_(spec.std)


# Acklam's coefficients, highest power first.
CENTRE_TOP = (
    -3.969683028665376e01, 2.209460984245205e02, -2.759285104469687e02,
    1.383577518672690e02, -3.066479806614716e01, 2.506628277459239e00,
)  # fmt: skip
CENTRE_BOTTOM = (
    -5.447609879822406e01, 1.615858368580409e02, -1.556989798598866e02,
    6.680131188771972e01, -1.328068155288572e01, 1.0,
)  # fmt: skip
TAIL_TOP = (
    -7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e00,
    -2.549732539343734e00, 4.374664141464968e00, 2.938163982698783e00,
)  # fmt: skip
TAIL_BOTTOM = (7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00, 1.0)
TAIL = 0.02425
"""Probability on either side where the tail formula takes over."""


def _inverse_cdf(centred: Tensor) -> Tensor:
    """x with Phi(x) = 1/2 + centred; float64 in (-1/2, 1/2)."""
    square = centred * centred
    x = _polynomial(square, CENTRE_TOP).mul_(centred).div_(_polynomial(square, CENTRE_BOTTOM))
    tail = (centred.abs() > 0.5 - TAIL).nonzero().squeeze(-1)  # about one element in twenty
    side = centred[tail]
    root = _log(0.5 - side.abs()).mul_(-2.0).sqrt_()
    value = _polynomial(root, TAIL_TOP).div_(_polynomial(root, TAIL_BOTTOM))  # for the left tail
    x[tail] = torch.where(side > 0, -value, value)
    return x


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    value = (x * coefficients[0]).add_(coefficients[1])
    for coefficient in coefficients[2:]:
        value.mul_(x).add_(coefficient)
    return value


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64 numbers, relative error below 1e-10, by + - * / alone."""
    # x = m 2^e with m in [sqrt(1/2), sqrt(2)): subtracting the bits of sqrt(1/2) makes the exponent field flip there
    bits = x.view(torch.int64)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    mantissa = (bits - (exponent << 52)).view(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)  # ln m = 2 (s + s^3 / 3 + s^5 / 5 + ...), |s| < 0.172
    square = s * s
    series = _polynomial(square, [2 / 13, 2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0]).mul_(s)
    return exponent.double().mul_(0.6931471805599453).add_(series)


_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD


def normal_cdf(x: float) -> float:
    """Phi(x) for |x| <= 5, error below 1e-10, by its power series: unlike `math.erf`, equal with every C library."""
    term, total = x, x
    for n in range(1, 200):
        term *= -x * x / (2 * n)
        total += term / (2 * n + 1)
    return 0.5 + total / math.sqrt(2 * math.pi)
