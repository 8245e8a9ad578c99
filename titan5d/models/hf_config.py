"""The fields of Hugging Face's `config.json` that all families share, both ways. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan5d.models.args import ModelArgs
from titan5d.models.rope_scaling import Llama3Scaling, RopeScaling, YarnScaling, yarn_mscale

REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def common_fields(args: ModelArgs) -> dict[str, Any]:
    """What every family's `config.json` says of these sizes."""
    return {
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": emit_scaling(args.rope_scaling),
        "tie_word_embeddings": args.tie_embeddings,
        "max_position_embeddings": args.max_seq_len,
    }


def unlike(args: ModelArgs, family: str, fixed: Mapping[str, Any]) -> list[str]:
    """A sentence for every size that has another value than the only one Hugging Face's `family` knows."""
    return [
        f"{key} = {getattr(args, key)!r}: Hugging Face's {family} has only {only!r}"
        for key, only in fixed.items()
        if getattr(args, key) != only
    ]


def read_common(
    config: Mapping[str, Any], only: Mapping[str, Any], required: tuple[str, ...] = REQUIRED
) -> dict[str, Any]:
    """The fields of ModelArgs that a `config.json` of any family gives (older `rope_theta`/`rope_scaling` or newer
    `rope_parameters`).

    Args:
        only: fields that may be absent but must not have another value.
        required: fields that must be there.

    Raises ValueError listing everything in it that is not built here.
    """
    problems = [
        f"config.json: {key} = {config[key]!r}, but only {wanted!r} is built here"
        for key, wanted in only.items()
        if config.get(key, wanted) != wanted
    ]
    problems += [f"config.json: {key} is missing" for key in required if config.get(key) is None]
    rope = rope_fields(config)
    scaling: RopeScaling | None = None
    try:
        scaling = parse_scaling(rope)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    heads = config["num_attention_heads"]
    return {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "ffn_dim": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        "rope_scaling": scaling,
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "max_seq_len": config.get("max_position_embeddings", 2048),
    }


def checked(args: ModelArgs) -> ModelArgs:
    """`args` again. Raises ValueError listing its problems."""
    if problems := args.problems():
        raise ValueError("\n".join(problems))
    return args


def rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table about the rotary embedding, under its newer or its older name."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def emit_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling` of a `config.json`."""
    if scaling is None:
        return None
    common = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_max_seq_len}
    if isinstance(scaling, Llama3Scaling):
        factors = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        return {"rope_type": "llama3", **common, **factors}
    betas = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return {"rope_type": "yarn", **common, **betas, "attention_factor": scaling.attention_factor}


def parse_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    """The rule in `rope_parameters` or `rope_scaling`. Raises ValueError for one that is not built here."""
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
