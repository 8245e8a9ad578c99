"""Block kernels against each other and the merge against one softmax over everything."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from titan5d.parallel import cuda_blocks
from titan5d.parallel.attention_blocks import (
    BlockKernels,
    CpuFlash,
    PlainMath,
    choose_block_kernels,
    merge_block_,
)
from titan5d.parallel.block_plan import Spans
from titan5d.parallel.cuda_blocks import CudaFlash, FlashAttnPackage

SPANS = {
    "dense": (2, 12, 12, None),
    "rectangle": (2, 12, 20, None),
    "documents": (1, 13, 17, Spans([0, 1, 6, 13], [0, 4, 5, 17])),
    "square documents": (1, 13, 13, Spans([0, 1, 6, 13], [0, 1, 6, 13])),
}
CASES = [
    ("dense", True),
    ("dense", False),
    ("rectangle", False),
    ("documents", False),
    ("square documents", True),
]


def tensors(
    case: str, kv_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Spans | None]:
    batch, q_len, k_len, spans = SPANS[case]
    generator = torch.Generator().manual_seed(1)

    def normal(length: int, heads: int) -> Tensor:
        return torch.randn(batch, length, heads, 16, generator=generator).to(dtype)

    return normal(q_len, 4), normal(k_len, kv_heads), normal(k_len, kv_heads), normal(q_len, 4), spans


def definition(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, spans: Spans | None
) -> list[Tensor]:
    """out, lse, dq, dk, dv in fp64."""
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k.repeat_interleave(group, 2)) * 0.3
    live = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    bounds = spans or Spans([0, q.shape[1]], [0, k.shape[1]])
    for n in range(len(bounds.q) - 1):
        part = live[bounds.q[n] : bounds.q[n + 1], bounds.k[n] : bounds.k[n + 1]]
        part.copy_(torch.ones_like(part).tril() if causal else torch.ones_like(part))
    scores = scores.masked_fill(~live[None, :, None], float("-inf"))
    out = torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(group, 2))
    return [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def run(kernels: BlockKernels, case: str, causal: bool, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    q, k, v, grad, spans = tensors(case, kv_heads, dtype)
    out, lse = kernels.forward(q, k, v, causal, 0.3, spans)
    return [out, lse, *kernels.backward(grad, q, k, v, out, lse, causal, 0.3, spans)]


def assert_is_the_definition(
    kernels: BlockKernels, case: str, causal: bool, kv_heads: int, dtype: torch.dtype
):
    q, k, v, grad, spans = tensors(case, kv_heads, dtype)
    tolerance = {torch.float32: 3e-6, torch.float64: 1e-14, torch.bfloat16: 1.5e-2}[dtype]
    expected = definition(q, k, v, grad, causal, spans)
    for found, right in zip(run(kernels, case, causal, kv_heads, dtype), expected, strict=True):
        assert found.shape == right.shape
        assert float((found - right).abs().max()) <= tolerance * float(right.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("case", "causal"), CASES)
@pytest.mark.parametrize(
    "kernels", [CpuFlash(), PlainMath(), PlainMath(rows=5)], ids=["cpu", "plain", "plain tiled"]
)
def test_kernels_are_the_definition(kernels: BlockKernels, case: str, causal: bool, kv_heads: int, dtype):
    assert_is_the_definition(kernels, case, causal, kv_heads, dtype)


def test_log_sum_exp_is_fp32_for_bf16():
    assert run(CpuFlash(), "dense", True, 2, torch.bfloat16)[1].dtype == torch.float32
    assert run(PlainMath(), "dense", True, 2, torch.bfloat16)[1].dtype == torch.float32


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_merge_of_blocks_is_one_softmax_and_cannot_overflow(shift: float):
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(3, 5, 2, 12, generator=generator) * 5 + shift
    scores[..., :4] += 300.0  # exp(300) is inf in fp32
    values = torch.randn(3, 12, 2, 6, generator=generator)
    out = torch.zeros(3, 5, 2, 6)
    lse = torch.full((3, 5, 2), float("-inf"))  # nothing met yet
    for keys in (slice(8, 12), slice(0, 4), slice(4, 8)):
        block_out = torch.einsum("bqhk,bkhd->bqhd", scores[..., keys].softmax(-1), values[:, keys])
        merge_block_(out, lse, block_out, scores[..., keys].logsumexp(-1))
    torch.testing.assert_close(
        out, torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), values), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_why_no_block_may_hold_a_query_without_a_key():
    """The trap the plan avoids: masked away altogether, a query has a log-sum-exp that is not -inf."""
    q, k, v, _, _ = tensors("dense", 4, torch.float32)
    dead = torch.full((1, 1, 12, 12), float("-inf"))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, attn_mask=dead)
    assert not (lse == float("-inf")).any()


class FlashKernels:
    """Stands in for the CUDA kernels of either library, with their argument order and layouts, in plain math."""

    def _flash_attn_forward(
        self, q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (
            dropout_p == softcap == 0.0
            and window_size_left == window_size_right == -1
            and alibi_slopes is None
        )
        assert q.dim() == k.dim() == 4 and not return_softmax
        out, lse = CpuFlash().forward(q, k, v, causal, softmax_scale, None)
        return out, lse.transpose(1, 2).contiguous(), None, None

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        spans = self._spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = CpuFlash().forward(q[None], k[None], v[None], causal, softmax_scale, spans)
        return out[0], lse[0].t().contiguous(), None, None

    def _flash_attn_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (
            softmax_lse.is_contiguous() and dq.is_contiguous() and dk.is_contiguous() and dv.is_contiguous()
        )
        lse = softmax_lse.transpose(1, 2)
        grads = CpuFlash().backward(dout, q, k, v, out, lse, causal, softmax_scale, None)
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad)

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        assert softmax_lse.is_contiguous()
        spans = self._spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        packed = (x[None] for x in (dout, q, k, v, out, softmax_lse.t()))
        grads = CpuFlash().backward(*packed, causal, softmax_scale, spans)
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad[0])

    def _flash_attention_forward(self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale):
        options = (dropout, scale, causal, -1, -1, 0.0, None, debug)
        if cum_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            return (*self._flash_attn_forward(q, k, v, *options), None)
        return (*self._flash_attn_varlen_forward(q, k, v, cum_q, cum_k, max_q, max_k, *options), None)

    def _flash_attention_backward(
        self, grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, *, scale
    ):
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        options = (dropout, scale, causal, -1, -1, 0.0, None, False)
        if cum_q is None:
            self._flash_attn_backward(grad, q, k, v, out, lse, *grads, *options)
        else:
            lengths = cum_q, cum_k, max_q, max_k
            self._flash_attn_varlen_backward(grad, q, k, v, out, lse, *grads, *lengths, *options)
        return grads

    def _spans(self, q: Tensor, k: Tensor, max_q: int, max_k: int) -> Spans:
        assert q.dtype == k.dtype == torch.int32
        assert (max_q, max_k) == (int(q.diff().max()), int(k.diff().max()))
        return Spans(q.tolist(), k.tolist())


@pytest.mark.parametrize(("case", "causal"), CASES)
def test_cuda_kernels_speak_the_layouts_of_torch(case: str, causal: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_blocks, "aten", FlashKernels())
    assert_is_the_definition(CudaFlash(), case, causal, 2, torch.float32)


@pytest.mark.parametrize(("case", "causal"), CASES)
def test_cuda_kernels_speak_the_layouts_of_flash_attn(
    case: str, causal: bool, monkeypatch: pytest.MonkeyPatch
):
    package = ModuleType("flash_attn.flash_attn_interface")
    stand_in = FlashKernels()
    for name in dir(stand_in):
        if name.startswith("_flash_attn_"):
            setattr(package, name, getattr(stand_in, name))
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", package)
    assert_is_the_definition(FlashAttnPackage(), case, causal, 2, torch.float32)


@pytest.mark.parametrize(("case", "causal"), CASES)
def test_cuda_kernels_of_torch_take_these_arguments(case: str, causal: bool):
    """Against the real operators' own shape functions, on tensors without memory."""
    q, k, v, grad, spans = tensors(case, 2, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v, grad = (torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in (q, k, v, grad))
        out, lse = CudaFlash().forward(q, k, v, causal, 0.3, spans)
        grads = CudaFlash().backward(grad, q, k, v, out, lse, causal, 0.3, spans)
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    assert lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_choice_of_kernels(monkeypatch: pytest.MonkeyPatch):
    choose = choose_block_kernels.__wrapped__
    assert isinstance(choose("cpu", torch.bfloat16, 7), CpuFlash)
    assert isinstance(choose("cuda", torch.float32, 64), PlainMath)
    assert isinstance(choose("cuda", torch.bfloat16, 100), PlainMath)
    assert isinstance(choose("xpu", torch.bfloat16, 64), PlainMath)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert isinstance(choose("cuda", torch.bfloat16, 64), PlainMath)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = SimpleNamespace(spec=None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found.spec)
    assert isinstance(choose("cuda", torch.bfloat16, 64), CudaFlash)
    found.spec = "somewhere"
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(
        sys.modules, "flash_attn.flash_attn_interface", ModuleType("flash_attn.flash_attn_interface")
    )
    assert isinstance(choose("cuda", torch.bfloat16, 64), FlashAttnPackage)
    assert choose_block_kernels("cpu", torch.float32, 64) is choose_block_kernels("cpu", torch.float32, 64)
