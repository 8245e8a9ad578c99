"""The Llama 3 family: its sizes, and its names and config fields in Hugging Face's format.

Sizes as published: Llama 3.1 (8B, 70B, 405B; arXiv:2407.21783, table 3) and Llama 3.2 (1B, 3B). `debug` is a small
model for a laptop's CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan5d.models.args import ModelArgs
from titan5d.models.hf_config import checked, common_fields, read_common
from titan5d.models.hf_names import attention_names, norm_names, outer_names, swiglu_names
from titan5d.models.rope_scaling import Llama3Scaling

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
    """Our parameter name -> Hugging Face's. Names only: both use the half-rotation layout, so no value moves."""
    block = norm_names() | attention_names(args) | swiglu_names("feed_forward", "mlp")
    names = outer_names(args)
    for n in range(args.n_layers):
        names |= {f"layers.{n}.{ours}": f"model.layers.{n}.{theirs}" for ours, theirs in block.items()}
    return names


def titan_name_map(args: ModelArgs) -> dict[str, str]:
    """Hugging Face's parameter name -> ours: the inverse of `hf_name_map`."""
    return {theirs: ours for ours, theirs in hf_name_map(args).items()}


def to_hf_config(args: ModelArgs) -> dict[str, Any]:
    """The fields of a Hugging Face `config.json` that describe this model.

    Raises ValueError for what Hugging Face's Llama cannot be (qk_norm, experts, latent attention).
    """
    problems = []
    if args.qk_norm:
        problems.append("qk_norm = True: Hugging Face's Llama has no norm on queries and keys")
    if args.n_experts:
        problems.append(f"n_experts = {args.n_experts}: Hugging Face's Llama has no experts")
    if args.kv_lora_rank:
        problems.append(f"kv_lora_rank = {args.kv_lora_rank}: Hugging Face's Llama has no latent attention")
    if problems:
        raise ValueError("\n".join(problems))
    return common_fields(args) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": args.head_dim,
        "attention_bias": args.attention_bias,
        "mlp_bias": False,
    }


def from_hf_config(config: Mapping[str, Any]) -> ModelArgs:
    """Reads a Hugging Face Llama `config.json`, as a dict.

    Raises ValueError listing everything in it that this model is not.
    """
    common = read_common(config, {"model_type": "llama", "hidden_act": "silu", "mlp_bias": False})
    head_dim, attention_bias = config.get("head_dim") or 0, config.get("attention_bias", False)
    return checked(ModelArgs(**common, head_dim=head_dim, attention_bias=attention_bias))
