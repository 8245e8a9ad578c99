"""Bytes that blocks keep for backward on one rank, under tensor, sequence and context cuts. Closed forms.

The forms of one device are in memory.py (`layer_activation_bytes`); here they are cut as the runtime cuts them:

    context           tokens of a row / c
    tensor            everything between the products / t
    + sequence        the residual stream / t too, so all of it; without it the stream is whole on each rank
    inputs kept       tensor_parallel_regather_input = false: the gathered inputs of q, k, v and of gate, up stay whole
    experts           rows of k experts a token, whichever rank they came from: ep changes nothing with even load;
                      etp slices: etp times as many rows arrive, each of 1/etp the hidden width

Proven piece by piece: tests/parallel/test_recompute.py, test_tensor_memory.py; together: tests/plan/.
"""

from __future__ import annotations

from titan5d.models.args import ModelArgs
from titan5d.plan.case import Case
from titan5d.plan.memory import latent_elements, layer_activation_bytes, router_bytes


def block_bytes(case: Case, with_experts: bool, mode: str, imbalance: float = 1.0) -> float:
    """What one block keeps of one micro-batch. mode: none, selective, full. imbalance: of the rows of experts."""
    args = case.expert_args if with_experts else case.dense_args
    tp = case.topology.tp
    whole = layer_activation_bytes(args, 1, case.element, mode)  # of one token on one device
    stream = stream_bytes(args, case.element, mode)
    tokens = case.tokens
    kept = case.stream_tokens * stream + tokens * (whole - stream) / tp
    if mode != "full":
        kept += tokens * _copied_heads(case, mode)
        kept += tokens * _kept_inputs(case, args)
    if with_experts and mode != "full":
        # of every row what arrives (none), or what the expert makes of it (selective), once more for each further slice
        copies = (case.topology.etp - 1) * args.top_k * args.dim * case.element
        kept += tokens * copies / tp
        if imbalance > 1:
            kept += (imbalance - 1) * tokens * (row_bytes(args, case.element, mode) + copies) / tp
    return kept


def stream_bytes(args: ModelArgs, element: int, mode: str) -> float:
    """Of `layer_activation_bytes` the part of the tokens a rank has of the residual stream, a token: inputs and outputs
    of the norms and their fp32 scales, or, selective, the block's input and attention's output; latent vectors and
    the router's part, which tensor ranks make of their own tokens."""
    if mode == "full":
        return args.dim * element
    own = latent_elements(args, mode) * element + router_bytes(args, element, mode)
    if mode == "selective":
        return 2 * args.dim * element + own
    return 4 * args.dim * element + 8 + own


def working_set(case: Case, with_experts: bool, imbalance: float = 1.0) -> float:
    """What a block in backward has on top of what was kept: its recomputed activations; nothing without recompute."""
    if case.recompute.mode == "none" or not case.recompute.share:
        return 0.0
    whole = block_bytes(case, with_experts, "none", imbalance)
    if case.topology.tp > 1 and case.sequence_parallel and case.recompute.mode == "full":
        # what the second forward gathers stays until the block's backward is over
        whole += case.tokens * 4 * case.args.dim * (1 - 1 / case.topology.tp) * case.element / 2
    return max(0.0, whole - block_bytes(case, with_experts, case.recompute.mode, imbalance))


def made_by_experts(case: Case, imbalance: float = 1.0) -> float:
    """Of `working_set` of a block with experts what the experts make: gate, up, product and output of their rows, or
    with selective the product."""
    if case.recompute.mode == "none" or not case.recompute.share:
        return 0.0
    args, again = case.expert_args, float(case.expert_args.moe_ffn_dim)
    if case.recompute.mode == "full":
        again = 3 * again + (0 if args.balance.score_before_w2 else args.dim)
    return imbalance * case.tokens / case.topology.tp * args.top_k * again * case.element


def kept_by_layer(case: Case, with_experts: bool, imbalance: float = 1.0) -> float:
    """What a block keeps of one micro-batch, averaged over the blocks that are recomputed and those that are not."""
    share = case.recompute.share if case.recompute.mode != "none" else 0.0
    kept = (1 - share) * block_bytes(case, with_experts, "none", imbalance) if share < 1 else 0.0
    return kept + (share * block_bytes(case, with_experts, case.recompute.mode, imbalance) if share else 0.0)


def weight_gradient_bytes(case: Case, with_experts: bool) -> float:
    """What a block holds of a micro-batch between I and W of a split backward: input and output gradient of each of its
    linear layers (routers and experts make theirs in I). Closed form: of each product Y = X W^T, X and dY."""
    args, tp = case.args, case.topology.tp
    heads, kv = args.n_heads * args.head_dim / tp, max(args.n_kv_heads / tp, 1) * args.head_dim
    made, inputs = (
        2 * heads + 2 * kv,
        args.dim,
    )  # dq, dk, dv and what the last product reads; the columns' input
    if args.kv_lora_rank:  # the way down to the latent vectors is not put off
        made = heads + args.n_heads * (args.qk_nope_head_dim + 2 * args.v_head_dim) / tp
        inputs = (args.q_lora_rank or args.dim) + args.kv_lora_rank
    wide = args.n_shared_experts * args.moe_ffn_dim if with_experts else args.ffn_dim
    feed_forward = args.dim if wide else 0
    elements = case.tokens * (made + 3 * wide / tp)
    # inputs of the columns, and gradients of the rows' outputs, are gathered again in W
    elements += (case.stream_tokens if case.regather_input else case.tokens) * (inputs + feed_forward)
    elements += case.stream_tokens * (args.dim + feed_forward)
    return elements * case.element


def context_buffers(case: Case) -> float:
    """What attention over cut rows holds beside q, k, v and its output, in the backward, which is the fuller pass.

    ring: two K/V blocks (here and coming in), three fp32 sums of their gradients, dq in fp32. allgather: K/V of whole
    rows and their fp32 gradients. ulysses: q, k, v and the output again, exchanged.
    """
    args, topology = case.args, case.topology
    if topology.cp == 1:
        return 0.0
    kv = 2 * case.tokens * max(args.n_kv_heads / topology.tp, 1) * args.head_dim  # elements of one block
    q = case.tokens * args.n_heads / topology.tp * args.head_dim
    if case.context_method == "ring":
        return 2 * kv * case.element + 3 * kv * 4 + q * 4
    if case.context_method == "allgather":
        return topology.cp * kv * (case.element + 4) + q * 4
    return 2 * (2 * q + kv) * case.element


def backward_gradients(case: Case) -> float:
    """Gradients of activations inside a dense block at its fullest: gate's and up's, when the product they make is
    gone."""
    return 2 * case.tokens * case.args.ffn_dim / case.topology.tp * case.element


def rope_tables(case: Case) -> float:
    """cos and sin of the angles of each place, fp32, which rotations of all blocks keep together."""
    args = case.args
    return 2 * case.tokens * (args.qk_rope_head_dim or args.head_dim) * 4


def row_bytes(args: ModelArgs, element: int, mode: str) -> float:
    """Bytes a token of the rows of its experts, inside `layer_activation_bytes`."""
    if mode == "selective":
        return args.top_k * (2 * args.moe_ffn_dim + args.dim) * element
    kept = 1 if args.balance.score_before_w2 else 2
    return args.top_k * (3 * args.moe_ffn_dim + kept * args.dim) * element


def _copied_heads(case: Case, mode: str) -> float:
    """Bytes a token by which k and v exceed 1/t where ranks share a key/value head."""
    args, tp = case.args, case.topology.tp
    if args.n_kv_heads >= tp:
        return 0.0
    return 2 * (1 - args.n_kv_heads / tp) * args.head_dim * case.element


def _kept_inputs(case: Case, args: ModelArgs) -> float:
    """Bytes a token of the gathered inputs, as far as they exceed the pieces."""
    tp = case.topology.tp
    if tp == 1 or not case.sequence_parallel or case.regather_input:
        return 0.0
    attention = args.dim
    if args.kv_lora_rank:
        attention = (args.q_lora_rank or args.dim) + args.kv_lora_rank
    feed_forward = 0 if args.n_experts and not args.n_shared_experts else args.dim
    return (attention + feed_forward) * (1 - 1 / tp) * case.element
