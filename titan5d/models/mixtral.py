"""The Mixtral family (arXiv:2401.04088): its sizes, and its names and config fields in Hugging Face's format.

Llama's attention; every feed-forward is 8 experts of which a token uses 2, their softmax scores normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan5d.models.args import ModelArgs
from titan5d.models.hf_config import REQUIRED, checked, common_fields, read_common, unlike
from titan5d.models.hf_names import (
    HFNames,
    attention_names,
    block_names,
    expert_names,
    norm_names,
    outer_names,
)

FLAVORS: dict[str, ModelArgs] = {
    # 9,185,536 parameters, 4,466,944 of them active
    "debug": ModelArgs(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=256,
        vocab_size=4096,
        n_experts=8,
        top_k=2,
        moe_ffn_dim=256,
    ),
    # 46,702,792,704 parameters, 12,879,925,248 active
    "8x7B": ModelArgs(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=14336,
        vocab_size=32000,
        rope_theta=1_000_000.0,
        max_seq_len=32768,
        n_experts=8,
        top_k=2,
        moe_ffn_dim=14336,
    ),
    # 140,620,634,112 parameters, 39,152,031,744 active
    "8x22B": ModelArgs(
        dim=6144,
        n_layers=56,
        n_heads=48,
        n_kv_heads=8,
        ffn_dim=16384,
        vocab_size=32000,
        rope_theta=1_000_000.0,
        max_seq_len=65536,
        n_experts=8,
        top_k=2,
        moe_ffn_dim=16384,
    ),
}


def hf_name_map(args: ModelArgs) -> HFNames:
    """Our name -> Hugging Face's, or one an expert (see hf_names.py)."""
    block: HFNames = {**norm_names(), **attention_names(args)}
    block["feed_forward.router.weight"] = "block_sparse_moe.gate.weight"
    block |= expert_names(args, "block_sparse_moe.experts", ("w1", "w2", "w3"))
    names: HFNames = dict(outer_names(args))
    for layer in range(args.n_layers):
        names |= block_names(block, layer)
    return names


def to_hf_config(args: ModelArgs) -> dict[str, Any]:
    """The fields of a Hugging Face `config.json` that describe this model.

    Raises ValueError for what Hugging Face's Mixtral cannot be.
    """
    fixed = {
        "attention_bias": False,
        "qk_norm": False,
        "kv_lora_rank": 0,
        "n_shared_experts": 0,
        "n_dense_layers": 0,
        "router_score": "softmax",
        "router_normalize": True,
        "router_scale": 1.0,
        "n_expert_groups": 1,
    }
    problems = unlike(args, "Mixtral", fixed)
    if not args.n_experts:
        problems.append("n_experts = 0: Hugging Face's Mixtral has experts in every layer")
    if problems:
        raise ValueError("\n".join(problems))
    return common_fields(args) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": args.moe_ffn_dim,
        "head_dim": args.head_dim,
        "num_local_experts": args.n_experts,
        "num_experts_per_tok": args.top_k,
        "sliding_window": None,
    }


def from_hf_config(config: Mapping[str, Any]) -> ModelArgs:
    """Reads a Hugging Face Mixtral `config.json`, as a dict.

    Raises ValueError listing everything in it that this model is not.
    """
    only = {"model_type": "mixtral", "hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0}
    common = read_common(config, only, (*REQUIRED, "num_local_experts", "num_experts_per_tok"))
    # absent fields: the defaults of Hugging Face's MixtralConfig
    common["norm_eps"] = config.get("rms_norm_eps", 1e-5)
    return checked(
        ModelArgs(
            **common,
            head_dim=config.get("head_dim") or 0,
            n_experts=config["num_local_experts"],
            top_k=config["num_experts_per_tok"],
            moe_ffn_dim=config["intermediate_size"],
        )
    )
