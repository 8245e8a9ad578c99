"""The kernels of attention: which is chosen, and that each is called for the attention it stands for."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity import TINY
from titan5d.config.check_device import feature_problems
from titan5d.config.schema import Config
from titan5d.models.attention import document_causal_mask
from titan5d.models.attention_backends import choose_backend, cumulative_lengths, set_attention_backend
from titan5d.models.decoder import Decoder

HALF, FULL = torch.bfloat16, torch.float32
CHOICES: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "cpu": (("auto", None, HALF, 64, True), "sdpa", "on a CPU"),
    "flash": (("auto", (9, 0), HALF, 64, True), "flash_attn", "different documents"),
    "old": (("auto", (7, 5), HALF, 64, True), "sdpa", "7.5 is below 8.0"),
    "wide": (("auto", (9, 0), FULL, 64, True), "sdpa", "float32 is no 16-bit type"),
    "odd": (("auto", (9, 0), HALF, 60, True), "sdpa", "head_dim = 60"),
    "absent": (("auto", (9, 0), HALF, 64, False), "sdpa", "not installed"),
    "asked": (("sdpa_math", (9, 0), HALF, 64, True), "sdpa_math", "model.attention_backend"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_and_its_reason(name: str) -> None:
    given, backend, why = CHOICES[name]
    chosen, reason = choose_backend(*given)
    assert chosen == backend and why in reason


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


class FakeFlashAttn(ModuleType):
    """The package's two functions, by its documentation, in plain torch."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.calls: list[tuple[int, ...]] = []

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        assert causal and q.dim() == 4
        self.calls.append(tuple(q.shape))
        return globals()["causal"](q, k, v)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool,
    ) -> Tensor:
        assert causal and q.dim() == 3 and cu_seqlens_q.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
        bounds = cu_seqlens_q.tolist()
        assert bounds[0] == 0 and bounds[-1] == q.shape[0]
        lengths = [b - a for a, b in pairwise(bounds)]
        assert min(lengths) > 0 and max(lengths) <= max_seqlen_q
        self.calls.append(tuple(lengths))
        parts = zip(*(x.unsqueeze(0).split(lengths, 1) for x in (q, k, v)), strict=True)
        return torch.cat([globals()["causal"](*part) for part in parts], 1).squeeze(0)


def _run(backend: str, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = Decoder(replace(TINY, n_layers=2))
    set_attention_backend(model, backend)  # type: ignore[arg-type]
    tokens = torch.arange(2 * 16).view(2, 16) % 256
    logits = model(tokens, document_ids=ids)
    logits.square().mean().backward()
    return logits.detach(), model.layers["0"].attention.wq.weight.grad


IDS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 10, [0] * 14 + [-1] * 2], dtype=torch.int32)


@pytest.mark.parametrize("backend", ["flash_attn", "sdpa_math"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole rows", "documents"])
def test_all_kernels_attend_alike(backend: str, ids: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFlashAttn()
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    logits, grad = _run(backend, ids)
    expected, expected_grad = _run("sdpa", ids)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-8)
    if backend == "flash_attn":
        assert fake.calls == [(2, 16, 8, 8) if ids is None else (5, 1, 10, 14, 2)] * 2


def test_whole_rows_by_torchs_flash_kernel() -> None:
    torch.testing.assert_close(_run("sdpa_flash", None)[0], _run("sdpa", None)[0])
    with pytest.raises(RuntimeError, match=r"No (available|viable)"):
        _run("sdpa_cudnn", None)


@pytest.mark.parametrize("seed", range(5))
def test_lengths_say_what_the_mask_says(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(3, 12, generator=generator) < 0.3).int().cumsum(1).int()
    lengths, mask = cumulative_lengths(ids), document_causal_mask(ids)
    assert lengths is not None and mask is not None and cumulative_lengths(None) is None
    spans = torch.zeros(36, dtype=torch.int64)
    spans[lengths[1:-1].long()] = 1
    document = spans.cumsum(0).view(3, 12)
    visible = (document[:, :, None] == document[:, None, :]).tril()
    assert torch.equal(visible, mask[:, 0])


def _config(backend: str, **training: Any) -> Config:
    config = Config()
    config.model.attention_backend = backend  # type: ignore[assignment]
    for key, value in training.items():
        setattr(config.training, key, value)
    return config


def test_what_cannot_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("sdpa_efficient", "sdpa_cudnn"):
        (problem,) = feature_problems(_config(backend), "cpu")
        assert f"'{backend}' needs a CUDA device, and this run is on cpu; use 'auto'" in problem
    assert "document_mask = true needs one" in feature_problems(_config("sdpa_flash"), "cpu")[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problems = feature_problems(_config("flash_attn", mixed_precision_param="float32"), "cuda", (7, 5))
    assert all(
        words in problem for words, problem in zip(("[gpu]", "'float32'", "has 7.5"), problems, strict=True)
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert feature_problems(_config("flash_attn"), "cuda", (8, 0)) == []
    ring = _config("sdpa")
    ring.parallelism.context_parallel_degree = 2
    assert "leave it at 'auto'" in feature_problems(ring, "cpu")[0]
    assert feature_problems(_config("auto"), "cpu") == feature_problems(_config("sdpa_math"), "cpu") == []
