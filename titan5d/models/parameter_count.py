"""How many parameters a decoder of given sizes has. Pure Python: nothing is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan5d.models.args import ModelArgs


@dataclass(frozen=True)
class ParameterCount:
    """Elements, not bytes. Buffers (the selection bias of a router) are no parameters.

    Attributes:
        total: all parameters; a tied matrix counts once.
        embedding: the input embedding (looked up, never multiplied).
        layer: one block; in a model with experts one that has them.
        head: the final norm and the output matrix; of a tied model the norm alone.
        matmul: weights one token is multiplied with: all projections, the router, its experts, and the head (also when
            tied). Training costs 6 FLOPs a token for each.
        active: parameters one token makes use of: all but the experts it is not sent to.
        largest_unit: the largest of embedding, block, and norm + head, which data parallelism gathers at once (tied:
            embedding, norm and head are one).
        routed: the routed experts of all layers.
        routed_layer: those of one layer.
        largest_other_unit: the largest unit where the routed experts of a block are a unit of their own.
    """

    total: int
    embedding: int
    layer: int
    head: int
    matmul: int
    active: int
    largest_unit: int
    routed: int
    routed_layer: int
    largest_other_unit: int


def count_parameters(args: ModelArgs) -> ParameterCount:
    """Counts the parameters of `Decoder(args)` from the sizes alone."""
    projections, vectors = _latent_attention(args) if args.kv_lora_rank else _attention(args)
    vectors += 2 * args.dim
    dense = 3 * args.dim * args.ffn_dim
    expert = 3 * args.dim * args.moe_ffn_dim
    always = args.dim * args.n_experts + args.n_shared_experts * expert  # router and shared experts
    n_expert_layers = args.n_layers - args.n_dense_layers if args.n_experts else 0
    n_dense_layers = args.n_layers - n_expert_layers

    dense_layer = projections + vectors + dense
    expert_layer = projections + vectors + always + args.n_experts * expert
    matrix = args.vocab_size * args.dim
    head = args.dim + (0 if args.tie_embeddings else matrix)
    total = matrix + n_dense_layers * dense_layer + n_expert_layers * expert_layer + head
    routed = args.n_experts * expert
    ends = matrix + head if args.tie_embeddings else max(head, matrix)
    largest_dense = max(ends, dense_layer if n_dense_layers else 0)
    products = (
        args.n_layers * projections
        + n_dense_layers * dense
        + n_expert_layers * (always + args.top_k * expert)
    )
    return ParameterCount(
        total=total,
        embedding=matrix,
        layer=expert_layer if n_expert_layers else dense_layer,
        head=head,
        matmul=products + matrix,
        active=total - n_expert_layers * (args.n_experts - args.top_k) * expert,
        largest_unit=max(largest_dense, expert_layer if n_expert_layers else 0),
        routed=n_expert_layers * routed,
        routed_layer=routed if n_expert_layers else 0,
        largest_other_unit=max(largest_dense, expert_layer - routed if n_expert_layers else 0),
    )


def _attention(args: ModelArgs) -> tuple[int, int]:
    """(weights of the projections, elements of biases and norms) of one layer's attention."""
    q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    vectors = 0
    if args.attention_bias:
        vectors += q_dim + 2 * kv_dim + args.dim
    if args.qk_norm:
        vectors += 2 * args.head_dim
    return args.dim * (q_dim + 2 * kv_dim) + q_dim * args.dim, vectors


def _latent_attention(args: ModelArgs) -> tuple[int, int]:
    q_dim, rank = args.n_heads * args.head_dim, args.kv_lora_rank
    queries = args.q_lora_rank * (args.dim + q_dim) if args.q_lora_rank else args.dim * q_dim
    keys_values = args.dim * (rank + args.qk_rope_head_dim)
    keys_values += rank * args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
    out = args.n_heads * args.v_head_dim * args.dim
    vectors = rank + args.q_lora_rank
    if args.attention_bias:  # only where the residual stream is read or written
        vectors += args.q_lora_rank + rank + args.qk_rope_head_dim + args.dim
    return queries + keys_values + out, vectors
