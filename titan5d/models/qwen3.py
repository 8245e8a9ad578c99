"""The Qwen3 family (arXiv:2505.09388), dense and with experts: sizes, and Hugging Face's names and config fields.

Queries and keys are normalised by head. The models with experts have 128 in every layer, a token uses 8, and their
softmax scores are normalised.
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
    swiglu_names,
)


def _published(
    dim: int, n_layers: int, n_heads: int, ffn_dim: int, tied: bool = False, **more: int
) -> ModelArgs:
    return ModelArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=more.pop("n_kv_heads", 8),
        ffn_dim=ffn_dim,
        vocab_size=151936,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_embeddings=tied,
        max_seq_len=40960,
        qk_norm=True,
        **more,  # type: ignore[arg-type]
    )


_DEBUG = ModelArgs(
    dim=256,
    n_layers=6,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=768,
    vocab_size=4096,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
)

FLAVORS: dict[str, ModelArgs] = {
    "debug": _DEBUG,  # 6,819,456 parameters
    "0.6B": _published(1024, 28, 16, 3072, tied=True),  # 596,049,920
    "1.7B": _published(2048, 28, 16, 6144, tied=True),  # 1,720,574,976
    "4B": _published(2560, 36, 32, 9728, tied=True),  # 4,022,468,096
    "8B": _published(4096, 36, 32, 12288),  # 8,190,735,360
    "14B": _published(5120, 40, 40, 17408),  # 14,768,307,200
    "32B": _published(5120, 64, 64, 25600),  # 32,762,123,264
    # 9,193,984 parameters, 4,475,392 of them active
    "debug_moe": _DEBUG.with_overrides(n_layers=4, n_experts=16, top_k=4, moe_ffn_dim=128),
    # 30,532,122,624 parameters, 3,353,032,704 active
    "30B-A3B": _published(2048, 48, 32, 6144, n_kv_heads=4, n_experts=128, top_k=8, moe_ffn_dim=768),
    # 235,093,634,560 parameters, 22,190,763,520 active
    "235B-A22B": _published(4096, 94, 64, 12288, n_kv_heads=4, n_experts=128, top_k=8, moe_ffn_dim=1536),
}


def hf_name_map(args: ModelArgs) -> HFNames:
    """Our name -> Hugging Face's, or one an expert (see hf_names.py)."""
    names: HFNames = dict(outer_names(args))
    for layer in range(args.n_layers):
        block: HFNames = {**norm_names(), **attention_names(args)}
        if args.has_experts(layer):
            block["feed_forward.router.weight"] = "mlp.gate.weight"
            block |= expert_names(args, "mlp.experts", ("gate_proj", "down_proj", "up_proj"))
        else:
            block |= swiglu_names("feed_forward", "mlp")
        names |= block_names(block, layer)
    return names


def to_hf_config(args: ModelArgs) -> dict[str, Any]:
    """The fields of a Hugging Face `config.json` that describe this model.

    Raises ValueError for what Hugging Face's Qwen3 cannot be.
    """
    fixed = {
        "qk_norm": True,
        "kv_lora_rank": 0,
        "n_shared_experts": 0,
        "router_score": "softmax",
        "router_scale": 1.0,
        "n_expert_groups": 1,
    }
    problems = unlike(args, "Qwen3", fixed)
    if problems:
        raise ValueError("\n".join(problems))
    fields = common_fields(args) | {
        "head_dim": args.head_dim,
        "attention_bias": args.attention_bias,
        "use_sliding_window": False,
    }
    if not args.n_experts:
        return fields | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return fields | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.top_k,
        "moe_intermediate_size": args.moe_ffn_dim,
        "norm_topk_prob": args.router_normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(args.n_dense_layers)),
    }


def from_hf_config(config: Mapping[str, Any]) -> ModelArgs:
    """Reads a Hugging Face Qwen3 `config.json`, as a dict: `model_type` qwen3 or qwen3_moe.

    Raises ValueError listing everything in it that this model is not.
    """
    with_experts = config.get("model_type") == "qwen3_moe"
    only: dict[str, Any] = {"model_type": "qwen3_moe" if with_experts else "qwen3"}
    only |= {"hidden_act": "silu", "use_sliding_window": False}
    required: tuple[str, ...] = REQUIRED
    experts: dict[str, Any] = {}
    # absent fields: the defaults of Hugging Face's Qwen3Config and Qwen3MoeConfig
    head_dim = config.get("head_dim") or (0 if with_experts else 128)
    if with_experts:
        only["decoder_sparse_step"] = 1
        required = (*REQUIRED, "moe_intermediate_size", "num_experts_per_tok")
        dense = list(config.get("mlp_only_layers") or [])
        only["mlp_only_layers"] = list(range(len(dense))) if dense else config.get("mlp_only_layers")
        experts = {
            # newer files of transformers say num_local_experts
            "n_experts": config.get("num_experts") or config.get("num_local_experts") or 128,
            "top_k": config.get("num_experts_per_tok"),
            "moe_ffn_dim": config.get("moe_intermediate_size"),
            "router_normalize": config.get("norm_topk_prob", False),
            "n_dense_layers": len(dense),
        }
    common = read_common(config, only, required)
    attention_bias = config.get("attention_bias", False)
    return checked(
        ModelArgs(**common, head_dim=head_dim, attention_bias=attention_bias, qk_norm=True, **experts)
    )
