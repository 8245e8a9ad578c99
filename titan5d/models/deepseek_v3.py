"""The DeepSeek-V3 family (arXiv:2412.19437): its sizes, and its names and config fields in Hugging Face's format.

Latent attention (mla.py). Sigmoid scores with a selection bias, groups of experts of which a token uses some, one
feed-forward for all tokens beside the chosen experts, the first layers without experts.

Flavors: `671B` is DeepSeek-V3, `16B` has the sizes of Moonlight-16B-A3B (arXiv:2502.16982), a small model of the same
design. Modules that predict further tokens (MTP) are not part of these models: their weights in a published checkpoint
are left aside, as transformers leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan5d.models.args import ModelArgs
from titan5d.models.hf_config import REQUIRED, checked, common_fields, emit_scaling, read_common, rope_fields
from titan5d.models.hf_names import HFNames, block_names, expert_names, norm_names, outer_names, swiglu_names
from titan5d.models.rope_scaling import YarnScaling, yarn_mscale

FLAVORS: dict[str, ModelArgs] = {
    # 8,436,608 parameters, 4,897,664 of them active
    "debug": ModelArgs(
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=8,
        ffn_dim=768,
        vocab_size=4096,
        norm_eps=1e-6,
        n_experts=16,
        top_k=4,
        moe_ffn_dim=128,
        n_shared_experts=1,
        n_dense_layers=1,
        router_score="sigmoid",
        router_scale=2.5,
        n_expert_groups=4,
        n_limited_groups=2,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    # 15,960,108,544 parameters, 2,914,774,528 active
    "16B": ModelArgs(
        dim=2048,
        n_layers=27,
        n_heads=16,
        n_kv_heads=16,
        ffn_dim=11264,
        vocab_size=163840,
        rope_theta=50_000.0,
        max_seq_len=8192,
        n_experts=64,
        top_k=6,
        moe_ffn_dim=1408,
        n_shared_experts=2,
        n_dense_layers=1,
        router_score="sigmoid",
        router_scale=2.446,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    # 671,026,404,352 parameters, 37,552,282,624 active
    "671B": ModelArgs(
        dim=7168,
        n_layers=61,
        n_heads=128,
        n_kv_heads=128,
        ffn_dim=18432,
        vocab_size=129280,
        norm_eps=1e-6,
        rope_scaling=YarnScaling(factor=40.0, original_max_seq_len=4096, attention_factor=yarn_mscale(40.0)),
        max_seq_len=163840,
        n_experts=256,
        top_k=8,
        moe_ffn_dim=2048,
        n_shared_experts=1,
        n_dense_layers=3,
        router_score="sigmoid",
        router_scale=2.5,
        n_expert_groups=8,
        n_limited_groups=4,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
}


def hf_name_map(args: ModelArgs) -> HFNames:
    """Our name -> Hugging Face's, or one an expert (see hf_names.py). The selection bias, a buffer, is among them."""
    names: HFNames = dict(outer_names(args))
    for layer in range(args.n_layers):
        block: HFNames = {**norm_names(), **_latent_attention_names(args)}
        if args.has_experts(layer):
            block["feed_forward.router.weight"] = "mlp.gate.weight"
            block["feed_forward.router.bias"] = "mlp.gate.e_score_correction_bias"
            block |= expert_names(args, "mlp.experts", ("gate_proj", "down_proj", "up_proj"))
            if args.n_shared_experts:
                block |= swiglu_names("feed_forward.shared_experts", "mlp.shared_experts")
        else:
            block |= swiglu_names("feed_forward", "mlp")
        names |= block_names(block, layer)
    return names


def _latent_attention_names(args: ModelArgs) -> dict[str, str]:
    modules = {
        "wkv_a": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "wkv_b": "kv_b_proj",
        "wo": "o_proj",
    }
    biased = ["wkv_a", "wo"]
    if args.q_lora_rank:
        modules |= {"wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj"}
        biased.append("wq_a")
    else:
        modules["wq"] = "q_proj"
    names = {f"attention.{ours}.weight": f"self_attn.{theirs}.weight" for ours, theirs in modules.items()}
    if args.attention_bias:
        names |= {f"attention.{ours}.bias": f"self_attn.{modules[ours]}.bias" for ours in biased}
    return names


def to_hf_config(args: ModelArgs) -> dict[str, Any]:
    """The fields of a Hugging Face `config.json` that describe this model.

    Raises ValueError for what Hugging Face's DeepSeek-V3 cannot be.
    """
    problems = []
    if args.router_score != "sigmoid":
        problems.append(f"router_score = {args.router_score!r}: Hugging Face's DeepSeek-V3 scores by sigmoid")
    for key in ("n_experts", "n_shared_experts", "kv_lora_rank"):
        if not getattr(args, key):
            problems.append(f"{key} = 0: Hugging Face's DeepSeek-V3 is never without")
    if problems:
        raise ValueError("\n".join(problems))
    return common_fields(args) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "rope_scaling": _emit_yarn(args),
        "rope_interleave": True,
        "attention_bias": args.attention_bias,
        "q_lora_rank": args.q_lora_rank or None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "n_routed_experts": args.n_experts,
        "num_experts_per_tok": args.top_k,
        "moe_intermediate_size": args.moe_ffn_dim,
        "n_shared_experts": args.n_shared_experts,
        "first_k_dense_replace": args.n_dense_layers,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": args.router_normalize,
        "routed_scaling_factor": args.router_scale,
        "n_group": args.n_expert_groups,
        "topk_group": args.n_limited_groups,
        "num_nextn_predict_layers": 0,
    }


def from_hf_config(config: Mapping[str, Any]) -> ModelArgs:
    """Reads a Hugging Face DeepSeek-V3 `config.json`, as a dict.

    Raises ValueError listing everything in it that this model is not.
    """
    only = {
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    experts = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    common = read_common(config, only, (*REQUIRED, *sizes, *experts))
    common["rope_scaling"] = _parse_yarn(config, common["rope_scaling"])
    return checked(
        ModelArgs(
            **common,
            **{size: config[size] for size in sizes},
            q_lora_rank=config.get("q_lora_rank") or 0,
            attention_bias=config.get("attention_bias", False),
            n_experts=config["n_routed_experts"],
            top_k=config["num_experts_per_tok"],
            moe_ffn_dim=config["moe_intermediate_size"],
            # absent fields: the defaults of Hugging Face's DeepseekV3Config
            n_shared_experts=config.get("n_shared_experts", 1),
            n_dense_layers=config.get("first_k_dense_replace", 3),
            router_score="sigmoid",
            router_normalize=config.get("norm_topk_prob", True),
            router_scale=config.get("routed_scaling_factor", 2.5),
            n_expert_groups=config.get("n_group") or 8,
            n_limited_groups=config.get("topk_group") or 4,
        )
    )


def _emit_yarn(args: ModelArgs) -> dict[str, Any] | None:
    """The factor of the scores is written as DeepSeek does: 1 on the rotated elements, mscale_all_dim for all."""
    scaling = emit_scaling(args.rope_scaling)
    if scaling is None or not isinstance(args.rope_scaling, YarnScaling):
        return scaling
    weight = (args.rope_scaling.attention_factor - 1.0) / (yarn_mscale(args.rope_scaling.factor) - 1.0)
    weight = float(f"{weight:.12g}")
    return scaling | {"attention_factor": 1.0, "mscale": weight, "mscale_all_dim": weight}


def _parse_yarn(config: Mapping[str, Any], scaling: Any) -> Any:
    if not isinstance(scaling, YarnScaling):
        return scaling
    rope = rope_fields(config)
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if not mscale or mscale != mscale_all_dim or rope.get("attention_factor") not in (None, 1.0):
        raise ValueError(
            f"config.json: yarn with mscale = {mscale}, mscale_all_dim = {mscale_all_dim}, attention_factor ="
            f" {rope.get('attention_factor')}; only mscale = mscale_all_dim above 0, without attention_factor, is built"
            " here"
        )
    return replace(scaling, attention_factor=yarn_mscale(scaling.factor, mscale_all_dim))
