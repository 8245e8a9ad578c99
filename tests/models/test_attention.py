"""Attention against an explicit softmax; packed documents against documents run alone."""

from __future__ import annotations

import math

import pytest
import torch

from titan5d.models.attention import Attention, SDPACore, document_causal_mask


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Softmax attention written out in fp64, one head at a time; visible (B, S, S)."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        keys, values = k[:, :, head // group].double(), v[:, :, head // group].double()
        scores = q[:, :, head].double() @ keys.transpose(1, 2) / math.sqrt(q.shape[-1])
        out[:, :, head] = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_core_equals_explicit_softmax(kv_heads: int, documents: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 12, 4, 8, generator=generator)
    k, v = (torch.randn(2, 12, kv_heads, 8, generator=generator) for _ in range(2))
    ids = torch.tensor([[0] * 12, [0] * 12])
    if documents:
        ids = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [7] * 1 + [3] * 11], dtype=torch.int32)
    visible = torch.zeros(2, 12, 12, dtype=torch.bool)
    for row in range(2):
        for query in range(12):
            for key in range(query + 1):
                visible[row, query, key] = ids[row, query] == ids[row, key]
    mask = document_causal_mask(ids if documents else None)
    if documents:
        assert mask is not None and torch.equal(mask, visible.unsqueeze(1))
    else:
        assert mask is None
    ours = SDPACore()(q, k, v, mask)
    assert ours.shape == q.shape
    torch.testing.assert_close(ours.double(), explicit(q, k, v, visible), rtol=1e-5, atol=1e-6)


def test_a_part_of_the_heads_runs_unchanged() -> None:
    """Head counts are read off the tensors: half of the heads' weights give half of the output."""
    torch.manual_seed(0)
    whole, half = Attention(16, 4, 2, 8), Attention(16, 2, 1, 8)
    x, cos, sin = torch.randn(1, 6, 16), torch.ones(1, 6, 1, 8), torch.zeros(1, 6, 1, 8)
    parts = []
    for part in range(2):
        for name in ("wq", "wk", "wv"):
            getattr(half, name).weight.data = getattr(whole, name).weight.data.chunk(2, 0)[part]
        half.wo.weight.data = whole.wo.weight.data.chunk(2, 1)[part]
        parts.append(half(x, cos, sin, None))
    torch.testing.assert_close(parts[0] + parts[1], whole(x, cos, sin, None), rtol=1e-5, atol=1e-6)
