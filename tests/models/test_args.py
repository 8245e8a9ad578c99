"""Sizes: their rules, their overrides, and the parameter count against built models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from titan5d.models.args import ModelArgs, count_parameters
from titan5d.models.decoder import Decoder
from titan5d.models.llama3 import FLAVORS
from titan5d.models.rope_scaling import Llama3Scaling

TINY = ModelArgs(dim=64, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=256)

VARIANTS = {
    "tiny": TINY,
    "tied": replace(TINY, tie_embeddings=True),
    "wide heads": replace(TINY, head_dim=16),
    "bias and qk_norm": replace(TINY, attention_bias=True, qk_norm=True),
    "one kv head": replace(TINY, n_kv_heads=1),
    **FLAVORS,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_count_equals_a_built_model(name: str) -> None:
    args = VARIANTS[name]
    with torch.device("meta"):
        model = Decoder(replace(args, n_layers=2))
    count = count_parameters(replace(args, n_layers=2))
    assert count.total == sum(parameter.numel() for parameter in model.parameters())
    assert model.tok_embeddings is not None and model.norm is not None and model.output is not None
    assert count.embedding == model.tok_embeddings.weight.numel()
    layer = sum(parameter.numel() for parameter in model.layers["0"].parameters())
    assert count.layer == layer
    products = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert count.matmul == products
    head = model.norm.weight.numel() + model.output.weight.numel()
    assert count.largest_unit == max(layer, head, count.embedding)
    # depth enters linearly
    assert count_parameters(args).total == count.total + (args.n_layers - 2) * layer
    assert count.active == count.total


def test_tiny_models_of_the_public_cases() -> None:
    assert count_parameters(TINY).total == 180_800
    assert count_parameters(replace(TINY, tie_embeddings=True)).total == 164_416
    # a tied head is still a product
    assert count_parameters(TINY).matmul == count_parameters(replace(TINY, tie_embeddings=True)).matmul


def test_head_dim_follows_unless_given() -> None:
    assert TINY.head_dim == 8
    assert TINY.with_overrides(dim=128).head_dim == 16
    assert TINY.with_overrides(n_heads=4).head_dim == 16
    assert TINY.with_overrides(dim=128, head_dim=32).head_dim == 32
    assert TINY.with_overrides(dim=None, n_layers=7) == replace(TINY, n_layers=7)
    with pytest.raises(TypeError, match="no field n_layer"):
        TINY.with_overrides(n_layer=7)


def test_good_sizes_have_no_problems() -> None:
    assert [args.problems() for args in VARIANTS.values()] == [[]] * len(VARIANTS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layers": 0}, "model.n_layers = 0"),
        ({"vocab_size": -1}, "model.vocab_size = -1"),
        ({"n_heads": 0}, "model.n_heads = 0"),
        ({"n_kv_heads": 0}, "model.n_kv_heads = 0"),
        ({"n_kv_heads": 3}, "n_kv_heads = 3 does not divide model.n_heads = 8.* use one of 1, 2, 4, 8"),
        ({"n_kv_heads": 16}, "n_kv_heads = 16 does not divide"),
        ({"dim": 60, "head_dim": 0}, "model.dim = 60 is no multiple of model.n_heads = 8"),
        ({"head_dim": 7}, "model.head_dim = 7.* even"),
        ({"norm_eps": 0.0}, "model.norm_eps = 0.0"),
        ({"rope_theta": 1.0}, "model.rope_theta = 1.0"),
        ({"rope_scaling": Llama3Scaling(8.0, 4.0, 1.0, 8192)}, "low_freq_factor = 4.0"),
    ],
)
def test_each_problem_is_named_alone(change: dict[str, object], words: str) -> None:
    problems = replace(TINY, **change).problems()  # type: ignore[arg-type]
    assert len(problems) == 1
    with pytest.raises(ValueError, match=words):
        Decoder(replace(TINY, **change))  # type: ignore[arg-type]


def test_all_problems_at_once() -> None:
    assert len(replace(TINY, n_layers=0, n_kv_heads=3, norm_eps=-1.0).problems()) == 3
