"""Qwen3, dense and with experts: published sizes; equality with transformers; files and config fields both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.models.hf_parity import (
    assert_config_there_and_back,
    assert_equal,
    assert_files_are_read_and_written,
    assert_published_count,
)
from titan5d.models import qwen3
from titan5d.models.args import ModelArgs
from titan5d.models.rope_scaling import YarnScaling

DENSE = ModelArgs(
    dim=64,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=96,
    vocab_size=256,
    head_dim=16,
    norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm=True,
    max_seq_len=64,
)
MOE = replace(DENSE, n_experts=8, top_k=2, moe_ffn_dim=48)
VARIANTS = {
    "dense": DENSE,
    "dense, tied, yarn": replace(DENSE, tie_embeddings=True, rope_scaling=YarnScaling(4.0, 16)),
    "dense, biases": replace(DENSE, attention_bias=True),
    "experts": MOE,
    "experts, not normalised": replace(MOE, router_normalize=False),
    "experts, top 1, not normalised": replace(MOE, top_k=1, router_normalize=False),
    "experts, top 8 of 8": replace(MOE, top_k=8),
    "first layer dense": replace(MOE, n_dense_layers=1),
}


@pytest.mark.parametrize(
    ("flavor", "total", "active"),
    [
        ("debug", 6_819_456, 6_819_456),
        ("0.6B", 596_049_920, 596_049_920),
        ("1.7B", 1_720_574_976, 1_720_574_976),
        ("4B", 4_022_468_096, 4_022_468_096),
        ("8B", 8_190_735_360, 8_190_735_360),
        ("14B", 14_768_307_200, 14_768_307_200),
        ("32B", 32_762_123_264, 32_762_123_264),
        ("debug_moe", 9_193_984, 4_475_392),
        ("30B-A3B", 30_532_122_624, 3_353_032_704),
        ("235B-A22B", 235_093_634_560, 22_190_763_520),
    ],
)
def test_published_parameter_counts(flavor: str, total: int, active: int) -> None:
    assert_published_count(qwen3, flavor, total, active)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_equal_transformers(name: str) -> None:
    assert_equal(qwen3, VARIANTS[name])


@pytest.mark.parametrize("args", [DENSE, VARIANTS["first layer dense"]], ids=["dense", "experts"])
def test_files_are_read_and_written(args: ModelArgs, tmp_path: Path) -> None:
    assert_files_are_read_and_written(qwen3, args, tmp_path)


@pytest.mark.parametrize("args", [*VARIANTS.values(), *qwen3.FLAVORS.values()])
def test_config_there_and_back(args: ModelArgs) -> None:
    assert_config_there_and_back(qwen3, args)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2, but only 1"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\], but only \[0\]"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"model_type": "qwen2_moe"}, "model_type = 'qwen2_moe'"),
    ],
)
def test_foreign_configs_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        qwen3.from_hf_config(qwen3.to_hf_config(MOE) | change)


def test_what_it_cannot_be_is_not_exported() -> None:
    with pytest.raises(ValueError, match=r"qk_norm = False.*\nn_shared_experts = 1.*\nrouter_scale = 2.0"):
        qwen3.to_hf_config(replace(MOE, qk_norm=False, n_shared_experts=1, router_scale=2.0))
