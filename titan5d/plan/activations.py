"""Bytes that blocks keep for backward on one rank, under tensor, sequence and context cuts. Closed forms.

The forms of one device are in memory.py (`layer_activation_bytes`); here they are cut as the runtime cuts them:

    context           tokens of a row / c
    tensor            everything between the products / t
    + sequence        the residual stream / t too, so all of it; without it the stream is whole on each rank
    inputs kept       tensor_parallel_regather_input = false: the gathered inputs of q, k, v and of gate, up stay whole
    experts           rows of k experts a token, whichever rank they came from: ep changes nothing with even load

Proven piece by piece: tests/parallel/test_recompute.py, test_tensor_memory.py; together: tests/plan/.
"""

from __future__ import annotations

from titan5d.models.args import ModelArgs
from titan5d.plan.case import Case
from titan5d.plan.memory import layer_activation_bytes


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
    if with_experts and mode != "full" and imbalance > 1:
        kept += (imbalance - 1) * tokens * _row_bytes(args, case.element, mode) / tp
    return kept


def stream_bytes(args: ModelArgs, element: int, mode: str) -> float:
    """Of `layer_activation_bytes` the part in the residual stream, a token: inputs and outputs of the norms and their
    fp32 scales; or, selective, the block's input and attention's output."""
    if mode == "full":
        return args.dim * element
    if mode == "selective":
        return 2 * args.dim * element
    return 4 * args.dim * element + 8


def working_set(case: Case, with_experts: bool, imbalance: float = 1.0) -> float:
    """What a block in backward has on top of what was kept: its recomputed activations; nothing without recompute."""
    if case.recompute.mode == "none" or not case.recompute.share:
        return 0.0
    whole = block_bytes(case, with_experts, "none", imbalance)
    if case.topology.tp > 1 and case.sequence_parallel and case.recompute.mode == "full":
        # what the second forward gathers stays until the block's backward is over
        whole += case.tokens * 4 * case.args.dim * (1 - 1 / case.topology.tp) * case.element / 2
    return max(0.0, whole - block_bytes(case, with_experts, case.recompute.mode, imbalance))


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
    if args.kv_lora_rank:
        kv = heads  # keys and values of each head, made from the latent vector
    wide = args.n_shared_experts * args.moe_ffn_dim if with_experts else args.ffn_dim
    pieces = 2 * args.dim if wide else args.dim  # inputs of the columns, gathered again in W
    elements = case.tokens * (2 * heads + 2 * kv + 3 * wide / tp)
    elements += (case.stream_tokens if case.regather_input else case.tokens) * pieces
    elements += case.stream_tokens * pieces  # gradients of the rows' outputs, gathered again in W
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


def backward_gradients(case: Case, with_experts: bool, imbalance: float = 1.0) -> float:
    """Gradients of activations inside a block at its fullest: gate's and up's, when the product they make is gone."""
    args = case.args
    wide = float(args.ffn_dim)
    if with_experts:
        wide = args.n_shared_experts * args.moe_ffn_dim + imbalance * args.top_k * args.moe_ffn_dim
    return 2 * case.tokens * wide / case.topology.tp * case.element


def rope_tables(case: Case) -> float:
    """cos and sin of the angles of each place, fp32, which rotations of all blocks keep together."""
    args = case.args
    return 2 * case.tokens * (args.qk_rope_head_dim or args.head_dim) * 4


def _row_bytes(args: ModelArgs, element: int, mode: str) -> float:
    """Bytes a token of the rows of its experts, inside `layer_activation_bytes`."""
    if mode == "selective":
        return args.top_k * (2 * args.moe_ffn_dim + args.dim) * element
    return args.top_k * (3 * args.moe_ffn_dim + 2 * args.dim) * element


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
    gathers = 1 if args.n_experts and not args.n_shared_experts else 2
    return gathers * args.dim * (1 - 1 / tp) * case.element
