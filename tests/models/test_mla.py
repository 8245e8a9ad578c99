"""Latent attention against its definition, head by head; sizes; YaRN's factor; what cuts rely on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from titan5d.models.args import ModelArgs, count_parameters
from titan5d.models.decoder import Decoder
from titan5d.models.init import init_specs
from titan5d.models.mla import LatentAttention
from titan5d.models.rope_scaling import YarnScaling, yarn_mscale

ARGS = ModelArgs(
    dim=32,
    n_layers=1,
    n_heads=4,
    n_kv_heads=4,
    ffn_dim=48,
    vocab_size=64,
    kv_lora_rank=16,
    q_lora_rank=20,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=10,
)
YARN = replace(ARGS, rope_scaling=YarnScaling(40.0, 4096, attention_factor=yarn_mscale(40.0)))


def build(args: ModelArgs) -> tuple[LatentAttention, Decoder]:
    torch.manual_seed(0)
    decoder = Decoder(args)
    attention = decoder.layers["0"].attention
    assert isinstance(attention, LatentAttention)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attention, decoder


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def by_definition(attention: LatentAttention, args: ModelArgs, x: Tensor) -> Tensor:
    """Equations 37-47 of DeepSeek-V2 for one row, in float64: pairs (2 i, 2 i + 1) turn by position * frequency i."""
    w = {name: parameter.double() for name, parameter in attention.named_parameters()}
    nope, rope, value, heads = args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim, args.n_heads
    scaling = args.rope_scaling
    frequencies = [args.rope_theta ** (-2 * i / rope) for i in range(rope // 2)]
    factor = 1.0
    if isinstance(scaling, YarnScaling):
        frequencies = scaling.frequencies(rope, args.rope_theta)
        factor = (0.1 * math.log(scaling.factor) + 1.0) ** 2

    def turned(vectors: Tensor) -> Tensor:
        pairs = torch.view_as_complex(vectors.unflatten(-1, (-1, 2)).contiguous())
        angles = torch.arange(len(vectors))[:, None] * torch.tensor(frequencies, dtype=torch.float64)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    x = x.double()
    if args.q_lora_rank:
        q = normed(x @ w["wq_a.weight"].T, w["q_norm.weight"]) @ w["wq_b.weight"].T
    else:
        q = x @ w["wq.weight"].T
    latent, shared_key = (x @ w["wkv_a.weight"].T).split((args.kv_lora_rank, rope), dim=-1)
    kv = normed(latent, w["kv_norm.weight"]) @ w["wkv_b.weight"].T
    outs = []
    for head in range(heads):
        q_head = q[:, head * (nope + rope) : (head + 1) * (nope + rope)]
        kv_head = kv[:, head * (nope + value) : (head + 1) * (nope + value)]
        scores = q_head[:, :nope] @ kv_head[:, :nope].T + turned(q_head[:, nope:]) @ turned(shared_key).T
        scores = scores * (nope + rope) ** -0.5 * factor
        hidden = torch.full_like(scores, -torch.inf).triu(1)
        outs.append((scores + hidden).softmax(-1) @ kv_head[:, nope:])
    return torch.cat(outs, dim=-1) @ w["wo.weight"].T


VARIANTS = {"rank": ARGS, "no rank": replace(ARGS, q_lora_rank=0), "yarn": YARN}


@pytest.mark.parametrize("name", VARIANTS)
def test_output_equals_the_definition(name: str) -> None:
    args = VARIANTS[name]
    attention, decoder = build(args)
    x = torch.randn(2, 11, 32)
    cos, sin = decoder.rope(None, 11)
    out = attention(x, cos, sin, None)
    for row in range(2):
        torch.testing.assert_close(
            out[row].double(), by_definition(attention, args, x[row]), rtol=1e-5, atol=1e-5
        )


def test_yarn_sharpens_all_scores_and_turns_by_no_other_length() -> None:
    """Case 030: the factor is the policy's, 1.873854, at any sequence length; the rotation itself is not stretched."""
    attention, decoder = build(YARN)
    assert attention.score_factor == pytest.approx(1.873854, rel=1e-6)
    for seq in (4, 32):
        cos, sin = decoder.rope(None, seq)
        assert torch.allclose(cos**2 + sin**2, torch.ones(()))
    assert build(ARGS)[0].score_factor == 1.0


def test_the_core_sees_keys_and_values_of_one_width_for_every_head() -> None:
    attention, decoder = build(ARGS)
    seen = {}

    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            seen.update(q=q.shape, k=k.shape, v=v.shape)
            return v

    attention.core = Core()
    cos, sin = decoder.rope(None, 5)
    assert attention(torch.randn(2, 5, 32), cos, sin, None).shape == (2, 5, 32)
    assert seen == dict.fromkeys("qkv", (2, 5, 4, 14))


def test_packed_documents_equal_documents_alone() -> None:
    _, decoder = build(ARGS)
    decoder.eval()
    row = torch.randint(64, (1, 12))
    ids = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = decoder(row, positions, ids)
    alone = torch.cat((decoder(row[:, :5]), decoder(row[:, 5:])), dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_counts_and_init_cover_every_parameter(name: str, bias: bool) -> None:
    args = replace(VARIANTS[name], attention_bias=bias)
    decoder = Decoder(args)
    count = count_parameters(args)
    assert count.total == sum(parameter.numel() for parameter in decoder.parameters())
    linears = [module for module in decoder.modules() if isinstance(module, nn.Linear)]
    assert count.matmul == sum(module.weight.numel() for module in linears)
    assert set(init_specs(args)) == {name for name, _ in decoder.named_parameters()}


def test_sizes_follow_when_they_are_overridden() -> None:
    assert ARGS.head_dim == 14 and ARGS.rope_dim == 6
    changed = ARGS.with_overrides(n_heads=8, qk_rope_head_dim=4, dim=64)
    assert (changed.n_kv_heads, changed.head_dim, changed.rope_dim) == (8, 12, 4)
    assert changed.problems() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_kv_heads": 2}, "model.n_kv_heads = 2, but latent attention"),
        ({"head_dim": 16}, r"model.head_dim = 16, but .* 8 \+ 6 = 14"),
        ({"qk_rope_head_dim": 5, "head_dim": 13}, "qk_rope_head_dim = 5"),
        ({"v_head_dim": 15}, "v_head_dim = 15 is wider than a query head"),
        ({"v_head_dim": 0}, "v_head_dim = 0"),
        ({"qk_norm": True}, "qk_norm = true"),
    ],
)
def test_each_problem_is_named_alone(change: dict[str, object], words: str) -> None:
    args = replace(ARGS, **change)  # type: ignore[arg-type]
    assert len(args.problems()) == 1
    with pytest.raises(ValueError, match=words):
        Decoder(args)
