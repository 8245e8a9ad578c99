"""A small model of the same kind: family, kinds of layers and ratios stay, some 100,000 parameters. Pure Python.

| kept | made small |
|---|---|
| grouped heads n_heads : n_kv_heads | their number, head_dim |
| whether dim = n_heads x head_dim | dim, ffn_dim, moe_ffn_dim |
| remainder of vocab_size by 16 (rows that do not divide over tensor ranks) | vocab_size |
| whether there are dense layers, shared experts, groups of experts, a rank of queries | their numbers |
| norms, scores, rotary scaling, tied matrices, biases: all that is no size | |
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from titan5d.models.args import ModelArgs

VOCAB = 256
FFN, EXPERT_FFN = 96, 32
MOST_EXPERTS = 8
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
Q_RANK = 40


def small_sizes(
    args: ModelArgs,
    n_layers: int | None,
    head_ranks: int,
    expert_ranks: int,
    slices: int,
    fits: Callable[[int], bool],
) -> dict[str, int]:
    """Sizes of the small model by their key in [model].

    Args:
        n_layers: given where stages are written out layer by layer; None = as few as there may be.
        head_ranks, expert_ranks, slices: the most ranks that share the heads, the experts, and one expert.
        fits: whether so many layers can be cut into the stages of the layouts.
    """
    sizes = {"vocab_size": min(args.vocab_size, VOCAB + args.vocab_size % 16), "ffn_dim": FFN}
    sizes |= _latent(args) if args.kv_lora_rank else _heads(args, head_ranks)
    dense = 0
    if args.n_experts:
        dense = min(args.n_dense_layers, 1)
        sizes |= _experts(args, expert_ranks, slices) | {"n_dense_layers": dense}
    if n_layers is None:
        least = dense + (2 if args.n_layers - args.n_dense_layers > 1 else 1)
        n_layers = next(n for n in count(min(least, args.n_layers)) if fits(n) or n >= args.n_layers)
    elif args.n_experts:  # stages were written out for these very layers
        sizes["n_dense_layers"] = args.n_dense_layers
    return {
        name: size for name, size in (sizes | {"n_layers": n_layers}).items() if size != getattr(args, name)
    }


def _heads(args: ModelArgs, ranks: int) -> dict[str, int]:
    """The fewest heads of the same ratio that so many ranks can share, if the model has them."""
    each = args.n_heads // args.n_kv_heads
    kv_heads = next(
        n for n in count(min(2, args.n_kv_heads)) if n * each % ranks == 0 or n >= args.n_kv_heads
    )
    heads = kv_heads * each
    head_dim = min(args.head_dim, 16 if heads <= 4 else 8)
    dim = heads * head_dim if args.dim == args.n_heads * args.head_dim else 48
    return {"n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim, "dim": dim}


def _latent(args: ModelArgs) -> dict[str, int]:
    heads = min(args.n_heads, 4)
    ranks = {"q_lora_rank": Q_RANK} if args.q_lora_rank else {}
    wide = LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]
    return LATENT | ranks | {"n_heads": heads, "n_kv_heads": heads, "head_dim": wide, "dim": 64}


def _experts(args: ModelArgs, ranks: int, slices: int) -> dict[str, int]:
    experts = args.n_experts if args.n_experts <= MOST_EXPERTS else max(MOST_EXPERTS, ranks)
    groups, limit = args.n_expert_groups, args.n_limited_groups
    if experts != args.n_experts:
        chosen = min(groups, 4)
        limit = chosen if limit == groups else min(limit, chosen - 1)
        groups = chosen
    return {
        "n_experts": experts,
        "top_k": min(args.top_k, max(1, experts // 4)),
        "moe_ffn_dim": min(args.moe_ffn_dim, -(-EXPERT_FFN // (2 * slices)) * 2 * slices),
        "n_shared_experts": min(args.n_shared_experts, 2),
        "n_expert_groups": groups,
        "n_limited_groups": limit,
    }
