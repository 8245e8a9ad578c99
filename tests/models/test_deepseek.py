"""DeepSeek-V3: published sizes; equality with transformers; files and config fields both ways."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
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
from titan5d.metrics.flops import flop_shape, flops_per_token
from titan5d.models import deepseek_v3
from titan5d.models.args import Balance, ModelArgs
from titan5d.models.rope_scaling import YarnScaling, yarn_mscale

TINY = ModelArgs(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    ffn_dim=96,
    vocab_size=256,
    norm_eps=1e-5,  # other than that of the latent norms
    rope_scaling=YarnScaling(4.0, 16, attention_factor=yarn_mscale(4.0)),
    max_seq_len=64,
    n_experts=8,
    top_k=2,
    moe_ffn_dim=48,
    n_shared_experts=2,
    n_dense_layers=1,
    router_score="sigmoid",
    router_scale=2.5,
    n_expert_groups=4,
    n_limited_groups=2,
    kv_lora_rank=32,
    q_lora_rank=40,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
FLAT = replace(TINY, n_expert_groups=1, n_limited_groups=1)
VARIANTS = {
    "671B's kind": TINY,
    "16B's kind": replace(FLAT, q_lora_rank=0, rope_scaling=None, rope_theta=50_000.0),
    "other mscale": replace(
        TINY, rope_scaling=YarnScaling(4.0, 16, attention_factor=yarn_mscale(4.0, 0.707))
    ),
    "biases, tied": replace(TINY, attention_bias=True, tie_embeddings=True),
    "no rank, biases": replace(TINY, attention_bias=True, q_lora_rank=0),
    "values as wide as keys": replace(TINY, v_head_dim=24),
    "score before w2": replace(TINY, balance=Balance(score_before_w2=True)),
}


@pytest.mark.parametrize(
    ("flavor", "total", "active"),
    [
        ("debug", 8_436_608, 4_897_664),
        ("16B", 15_960_108_544, 2_914_774_528),
        ("671B", 671_026_404_352, 37_552_282_624),
    ],
)
def test_published_parameter_counts(flavor: str, total: int, active: int) -> None:
    assert_published_count(deepseek_v3, flavor, total, active)


def test_published_flops() -> None:
    shape = flop_shape(deepseek_v3.FLAVORS["671B"])
    assert flops_per_token(shape, 4096) == pytest.approx(250.45e9, rel=1e-4)
    assert flops_per_token(shape, 4096, "full") == pytest.approx(281.15e9, rel=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_equal_transformers(name: str) -> None:
    assert_equal(deepseek_v3, VARIANTS[name])


@pytest.mark.parametrize(("normalize", "scale", "top_k"), [*product((True, False), (1.0, 2.5), (1, 2, 8))])
def test_routing_of_imported_models(normalize: bool, scale: float, top_k: int) -> None:
    """Case 063: sigmoid scores, a shared expert, a selection bias that is not zero."""
    assert_equal(deepseek_v3, replace(FLAT, router_normalize=normalize, router_scale=scale, top_k=top_k))


def test_files_are_read_and_written(tmp_path: Path) -> None:
    assert_files_are_read_and_written(deepseek_v3, TINY, tmp_path)


@pytest.mark.parametrize("args", [*VARIANTS.values(), *deepseek_v3.FLAVORS.values()])
def test_config_there_and_back(args: ModelArgs) -> None:
    if args.balance == Balance():  # how it is trained is not part of a config
        assert_config_there_and_back(deepseek_v3, args)


def test_the_published_yarn_fields_are_read() -> None:
    """Case 030: factor 40, mscale_all_dim 1: 192^-0.5 x 1.873854 whatever the sequence length."""
    published = {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    args = deepseek_v3.FLAVORS["671B"]
    config = deepseek_v3.to_hf_config(args) | {"rope_scaling": published}
    for length in (1024, 4096, 163840):
        read = deepseek_v3.from_hf_config(config | {"max_position_embeddings": length})
        assert read == replace(args, max_seq_len=length)
        assert isinstance(read.rope_scaling, YarnScaling)
        assert read.head_dim**-0.5 * read.rope_scaling.softmax_multiplier == pytest.approx(
            0.135233779, rel=1e-8
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax', but only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"num_key_value_heads": 2}, "model.n_kv_heads = 2, but latent attention"),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "mscale": 1.0,
                }
            },
            "mscale = 1.0, mscale_all_dim = None",
        ),
    ],
)
def test_foreign_configs_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        deepseek_v3.from_hf_config(deepseek_v3.to_hf_config(TINY) | change)


def test_what_it_cannot_be_is_not_exported() -> None:
    with pytest.raises(ValueError, match=r"router_score = 'softmax'.*\nn_shared_experts = 0"):
        deepseek_v3.to_hf_config(replace(TINY, router_score="softmax", n_shared_experts=0))
