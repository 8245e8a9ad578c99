"""Names of Hugging Face's checkpoints: what the families have in common, and stacks of experts.

A checkpoint on the Hub holds each expert's matrices by themselves; here all experts of a layer are one parameter. So a
name of ours stands for one name there, or, for a stack, for one name an expert in the order of the stack:

    layers.0.attention.wq.weight      "model.layers.0.self_attn.q_proj.weight"
    layers.0.feed_forward.experts.w1  ("model.layers.0.mlp.experts.0.gate_proj.weight", "... .1. ...", ...)

Values never move or turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from titan5d.models.args import ModelArgs

if TYPE_CHECKING:
    from torch import Tensor

HFNames = dict[str, str | tuple[str, ...]]
"""Our name of a parameter or saved buffer -> Hugging Face's, or one an expert."""


def outer_names(args: ModelArgs) -> dict[str, str]:
    """Embedding, norm and head. A tied head has no name of its own, here as there."""
    names = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not args.tie_embeddings:
        names["output.weight"] = "lm_head.weight"
    return names


def norm_names() -> dict[str, str]:
    """The two norms of a block."""
    return {
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
    }


def attention_names(args: ModelArgs) -> dict[str, str]:
    """The attention of a block: Llama's names, Qwen3's for the norms of queries and keys."""
    names: dict[str, str] = {}
    kinds = ("weight", "bias") if args.attention_bias else ("weight",)
    for ours, theirs in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"), ("wo", "o_proj")):
        names |= {f"attention.{ours}.{kind}": f"self_attn.{theirs}.{kind}" for kind in kinds}
    if args.qk_norm:
        names |= {f"attention.{norm}.weight": f"self_attn.{norm}.weight" for norm in ("q_norm", "k_norm")}
    return names


def swiglu_names(ours: str, theirs: str) -> dict[str, str]:
    """A feed-forward called `ours` here and `theirs` there."""
    matrices = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
    return {f"{ours}.{mine}.weight": f"{theirs}.{name}.weight" for mine, name in matrices}


def expert_names(args: ModelArgs, theirs: str, matrices: tuple[str, str, str]) -> dict[str, tuple[str, ...]]:
    """The stacks of a block's experts. `matrices`: what the files call w1, w2 and w3."""
    return {
        f"feed_forward.experts.{ours}": tuple(f"{theirs}.{n}.{name}.weight" for n in range(args.n_experts))
        for ours, name in zip(("w1", "w2", "w3"), matrices, strict=True)
    }


def block_names(names: Mapping[str, str | tuple[str, ...]], layer: int) -> HFNames:
    """Names inside a block -> names in the model."""
    prefix = f"model.layers.{layer}."
    return {
        f"layers.{layer}.{ours}": prefix + theirs
        if isinstance(theirs, str)
        else tuple(prefix + one for one in theirs)
        for ours, theirs in names.items()
    }


def to_hf(names: Mapping[str, str | tuple[str, ...]], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under Hugging Face's names; a stack gives views of its parts. Other tensors are left out."""
    tensors: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        if ours not in state:
            continue
        if isinstance(theirs, str):
            tensors[theirs] = state[ours]
        else:
            tensors |= dict(zip(theirs, state[ours].unbind(0), strict=True))
    return tensors


def from_hf(names: Mapping[str, str | tuple[str, ...]], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's tensors under our names; the parts of a stack are copied into one tensor.

    Raises ValueError naming the tensors that are missing.
    """
    import torch

    wanted = [name for theirs in names.values() for name in ([theirs] if isinstance(theirs, str) else theirs)]
    if missing := [name for name in wanted if name not in tensors]:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ValueError(f"the checkpoint has no {shown}")
    return {
        ours: tensors[theirs] if isinstance(theirs, str) else torch.stack([tensors[one] for one in theirs])
        for ours, theirs in names.items()
    }
