"""Mixtral: published sizes; equality with transformers' MixtralForCausalLM; files and config fields both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.models.hf_parity import (
    as_files,
    assert_config_there_and_back,
    assert_equal,
    assert_files_are_read_and_written,
    assert_published_count,
    theirs,
)
from titan5d.metrics.flops import flop_shape, flops_per_token
from titan5d.models import mixtral
from titan5d.models.args import Balance, ModelArgs
from titan5d.models.hf_names import from_hf

TINY = ModelArgs(
    dim=64,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=96,
    vocab_size=256,
    n_experts=8,
    top_k=2,
    moe_ffn_dim=96,
)
VARIANTS = {
    "top 2": TINY,
    "top 1": replace(TINY, top_k=1),
    "top 8 of 8": replace(TINY, top_k=8),
    "score before w2": replace(TINY, balance=Balance(score_before_w2=True)),
    "three experts": replace(TINY, n_experts=3, tie_embeddings=True, head_dim=16),
}


@pytest.mark.parametrize(
    ("flavor", "total", "active"),
    [
        ("debug", 9_185_536, 4_466_944),
        ("8x7B", 46_702_792_704, 12_879_925_248),
        ("8x22B", 140_620_634_112, 39_152_031_744),
    ],
)
def test_published_parameter_counts(flavor: str, total: int, active: int) -> None:
    assert_published_count(mixtral, flavor, total, active)


def test_published_flops() -> None:
    shape = flop_shape(mixtral.FLAVORS["8x7B"])
    assert flops_per_token(shape, 4096) == pytest.approx(79.71e9, rel=1e-4)
    assert flops_per_token(shape, 4096, "full") == pytest.approx(82.93e9, rel=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_equal_transformers(name: str) -> None:
    assert_equal(mixtral, VARIANTS[name])


def test_files_are_read_and_written(tmp_path: Path) -> None:
    assert_files_are_read_and_written(mixtral, TINY, tmp_path)


@pytest.mark.parametrize("args", [TINY, VARIANTS["three experts"], *mixtral.FLAVORS.values()])
def test_config_there_and_back(args: ModelArgs) -> None:
    assert_config_there_and_back(mixtral, args)


def test_missing_experts_are_named() -> None:
    files = as_files(theirs(mixtral, TINY))
    del files["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    with pytest.raises(ValueError, match=r"has no model.layers.1.block_sparse_moe.experts.3.w2.weight$"):
        from_hf(mixtral.hf_name_map(TINY), files)
    some = {name: torch.empty(0) for name in files if ".experts." not in name}
    with pytest.raises(ValueError, match=r"experts.0.w1.weight, .* and 40 more"):
        from_hf(mixtral.hf_name_map(TINY), some)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 4096}, "sliding_window = 4096, but only None"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"num_experts_per_tok": 9}, "top_k = 9"),
        ({"model_type": "llama"}, "model_type = 'llama'"),
    ],
)
def test_foreign_configs_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mixtral.from_hf_config(mixtral.to_hf_config(TINY) | change)


def test_what_it_cannot_be_is_not_exported() -> None:
    args = replace(TINY, n_shared_experts=1, router_score="sigmoid", n_dense_layers=1)
    with pytest.raises(
        ValueError, match=r"n_shared_experts = 1.*\nn_dense_layers = 1.*\nrouter_score = 'sigmoid'"
    ):
        mixtral.to_hf_config(args)
    with pytest.raises(ValueError, match="n_experts = 0"):
        mixtral.to_hf_config(replace(TINY, n_experts=0, top_k=0, moe_ffn_dim=0))
