"""The Llama 3 family: its sizes, and its names and config fields in Hugging Face's format.

Sizes as published: Llama 3.1 (8B, 70B, 405B; arXiv:2407.21783, table 3) and Llama 3.2 (1B, 3B). `debug` is a small
model for a laptop's CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan5d.models.args import ModelArgs
from titan5d.models.rope_scaling import Llama3Scaling, RopeScaling, YarnScaling, yarn_mscale

LLAMA_3_1 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
LLAMA_3_2 = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def _published(
    dim: int, n_layers: int, n_heads: int, ffn_dim: int, scaling: Llama3Scaling, tied: bool = False
) -> ModelArgs:
    return ModelArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        ffn_dim=ffn_dim,
        vocab_size=128256,
        rope_theta=500_000.0,
        rope_scaling=scaling,
        tie_embeddings=tied,
        max_seq_len=131072,
    )


FLAVORS: dict[str, ModelArgs] = {
    "debug": ModelArgs(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=4096
    ),  # 6,819,072
    "1B": _published(2048, 16, 32, 8192, LLAMA_3_2, tied=True),  # 1,235,814,400 parameters
    "3B": _published(3072, 28, 24, 8192, LLAMA_3_2, tied=True),  # 3,212,749,824
    "8B": _published(4096, 32, 32, 14336, LLAMA_3_1),  # 8,030,261,248
    "70B": _published(8192, 80, 64, 28672, LLAMA_3_1),  # 70,553,706,496
    "405B": _published(16384, 126, 128, 53248, LLAMA_3_1),  # 405,853,388,800
}


def hf_name_map(args: ModelArgs) -> dict[str, str]:
    """Our parameter name -> Hugging Face's. Names only: both use the half-rotation layout, so no value moves.

    A tied head has no name of its own, here as there.
    """
    names = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not args.tie_embeddings:
        names["output.weight"] = "lm_head.weight"
    block = {
        "attention_norm.weight": "input_layernorm.weight",
        "attention.wq.weight": "self_attn.q_proj.weight",
        "attention.wk.weight": "self_attn.k_proj.weight",
        "attention.wv.weight": "self_attn.v_proj.weight",
        "attention.wo.weight": "self_attn.o_proj.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "feed_forward.w1.weight": "mlp.gate_proj.weight",
        "feed_forward.w2.weight": "mlp.down_proj.weight",
        "feed_forward.w3.weight": "mlp.up_proj.weight",
    }
    if args.attention_bias:
        for ours, theirs in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"), ("wo", "o_proj")):
            block[f"attention.{ours}.bias"] = f"self_attn.{theirs}.bias"
    if args.qk_norm:  # not in Llama; Qwen3's names
        block["attention.q_norm.weight"] = "self_attn.q_norm.weight"
        block["attention.k_norm.weight"] = "self_attn.k_norm.weight"
    for n in range(args.n_layers):
        names |= {f"layers.{n}.{ours}": f"model.layers.{n}.{theirs}" for ours, theirs in block.items()}
    return names


def titan_name_map(args: ModelArgs) -> dict[str, str]:
    """Hugging Face's parameter name -> ours: the inverse of `hf_name_map`."""
    return {theirs: ours for ours, theirs in hf_name_map(args).items()}


def to_hf_config(args: ModelArgs) -> dict[str, Any]:
    """The fields of a Hugging Face `config.json` that describe this model.

    Raises ValueError for what Hugging Face's Llama cannot be (qk_norm).
    """
    if args.qk_norm:
        raise ValueError("qk_norm = True: Hugging Face's Llama has no norm on queries and keys")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": _emit_scaling(args.rope_scaling),
        "tie_word_embeddings": args.tie_embeddings,
        "max_position_embeddings": args.max_seq_len,
        "attention_bias": args.attention_bias,
        "mlp_bias": False,
    }


def from_hf_config(config: Mapping[str, Any]) -> ModelArgs:
    """Reads a Hugging Face Llama `config.json` (as a dict; older `rope_theta`/`rope_scaling` or newer
    `rope_parameters`).

    Raises ValueError listing everything in it that this model is not.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    problems = [
        f"config.json: {key} = {config[key]!r}, but only {wanted!r} is built here"
        for key, wanted in (("model_type", "llama"), ("hidden_act", "silu"), ("mlp_bias", False))
        if config.get(key, wanted) != wanted
    ]
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    problems += [f"config.json: {key} is missing" for key in required if key not in config]
    scaling: RopeScaling | None = None
    try:
        scaling = _parse_scaling(rope)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    heads = config["num_attention_heads"]
    # absent fields: the defaults of Hugging Face's LlamaConfig
    args = ModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        head_dim=config.get("head_dim") or 0,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        rope_scaling=scaling,
        tie_embeddings=config.get("tie_word_embeddings", False),
        max_seq_len=config.get("max_position_embeddings", 2048),
        attention_bias=config.get("attention_bias", False),
    )
    if found := args.problems():
        raise ValueError("\n".join(found))
    return args


def _emit_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    common = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_max_seq_len}
    if isinstance(scaling, Llama3Scaling):
        factors = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        return {"rope_type": "llama3", **common, **factors}
    betas = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return {"rope_type": "yarn", **common, **betas, "attention_factor": scaling.attention_factor}


def _parse_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("llama3", "yarn"):
        raise ValueError(
            f"config.json: rope_type = {kind!r}, but only default, llama3 and yarn are built here"
        )
    names = ["factor", "original_max_position_embeddings"]
    if kind == "llama3":
        names += ["low_freq_factor", "high_freq_factor"]
    if missing := [name for name in names if rope.get(name) is None]:
        raise ValueError(f"config.json: rope_type = {kind!r} needs {', '.join(missing)}")
    factor, original = float(rope["factor"]), int(rope["original_max_position_embeddings"])
    if kind == "llama3":
        return Llama3Scaling(
            factor, float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), original
        )
    if not rope.get("truncate", True):
        raise ValueError("config.json: rope_type = 'yarn' with truncate = False is not built here")
    return _parse_yarn(rope, factor, original)


def _parse_yarn(rope: Mapping[str, Any], factor: float, original: int) -> YarnScaling:
    attention_factor = float(rope.get("attention_factor") or 0)
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if not attention_factor and mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_max_seq_len=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=attention_factor,
    )
