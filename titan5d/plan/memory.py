"""Bytes one rank holds: training state, gathered units, activations, logits. Closed forms, pure Python.

Training state per parameter, 16 bytes in fp32 (weights 4, gradients 4, Adam 4 + 4), cut over N ranks by stage:

    stage   weights   gradients   optimizer   gathered
      0        1          1           1          1         a working copy in the compute type, as in all stages
      1        1/N        1           1/N        1         weights are sharded between steps, gathered within
      2        1/N        1/N         1/N        1
      3        1/N        1/N         1/N        2 units   the one in use, and the one fetched ahead

    With one micro-batch a step nothing accumulates, and stage 1 holds 1/N of the gradients as stage 2 does.
    On top come buffers of two units: in forward what was gathered, before it is copied to its parameters; in backward
    the gradients of the unit that is computed, and in the reduce type those of the unit that is sent.
    One rank that computes in the type it stores works on the weights themselves: gathered 0, buffers 0.

What is measured: metrics/memory_ledger.py; that both agree: tests/parallel/test_data_ledger.py and test_recompute.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan5d.models.args import ModelArgs


REDUCE_BYTES = 4
"""Gradients are summed, and accumulated over micro-batches, in fp32."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank, each at its fullest moment of a step.

    Attributes:
        weights, optimizer: as stored.
        gradients: what is kept until the update.
        gathered: whole weights in the compute type.
        buffers: of gathers and reductions.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    buffers: float

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.gathered + other.gathered,
            self.buffers + other.buffers,
        )

    @property
    def total(self) -> float:
        """An upper bound: the moments differ."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.buffers


def state_bytes(
    parameters: int,
    largest_unit: int,
    stage: int,
    shards: int,
    param_bytes: int = 4,
    compute_bytes: int = 4,
    optimizer_bytes: float = 8,
    whole_gradients: bool = False,
    working_copy: bool = True,
    copies: bool = False,
) -> StateBytes:
    """Training state of `parameters` elements sharded over `shards` ranks.

    Args:
        parameters: elements this rank's group shares (all of the model without tensor or pipeline cuts).
        largest_unit: elements of the largest unit gathered at once.
        param_bytes, compute_bytes: per element as stored, as gathered.
        optimizer_bytes: per element; 8 for Adam, 4 for SGD with momentum or Muon, 0 for plain SGD.
        whole_gradients: each rank sums its gradients over micro-batches before they are reduced.
        working_copy: False where ranks compute with the parameters they store: in stage 0, in the type stored.
        copies: without a working copy: other ranks hold the same, so gradients are laid side by side to be summed.
    """
    cut = parameters / shards
    stored = parameters if stage == 0 else cut
    gradients = stored * param_bytes
    if whole_gradients and working_copy:
        gradients = parameters * REDUCE_BYTES
    gathered = min(parameters, 2 * largest_unit) if stage == 3 else parameters
    return StateBytes(
        weights=stored * param_bytes,
        gradients=gradients,
        optimizer=stored * optimizer_bytes,
        gathered=gathered * compute_bytes if working_copy else 0,
        buffers=largest_unit * ((compute_bytes + REDUCE_BYTES) if working_copy else REDUCE_BYTES * copies),
    )


def layer_activation_bytes(args: ModelArgs, tokens: int, element_bytes: int, recompute: str) -> float:
    """What one block keeps for backward, for `tokens` tokens of one micro-batch.

    none: A1 = T (8h + 4 n_h d + 4 n_kv d + 6f + 4 n_h + 8) bytes in bf16: the two inputs of the norms and what they
    return; rotated q, k, v and the attention's output; gate, up and their product (silu is computed again); fp32
    log-sum-exp of each head and scale of each norm.
    selective: outputs of the products, except the last one, which nothing needs again, and the block's input.
    full: the block's input.

    Latent attention has as many key heads as heads, values are widened to the keys' d, and the output is kept widened
    (for attention) and cut to n_h d_v (for the product behind it). Its latent vectors: `latent_elements`.

    Of a block with experts, whose load is taken as even: f is the width of the shared experts, and k (3 f_e + 2 h)
    elements a token come on top, the rows of its k experts, their gate, up, product, and outputs; of these selective
    keeps k (2 f_e + h). Weighted before w2 (score_before_w2) nothing needs the outputs: k (3 f_e + h). The router's
    part: `router_bytes`. Of dense and other blocks the larger counts.
    """
    if recompute == "full":
        return tokens * args.dim * element_bytes
    half, kept_whole = element_bytes / 2, recompute == "none"
    heads = args.n_heads * args.head_dim
    kv = args.n_kv_heads * args.head_dim
    shared, routed = args.n_shared_experts * args.moe_ffn_dim, args.top_k * args.moe_ffn_dim
    dense = args.ffn_dim if args.n_dense_layers or not args.n_experts else 0
    rows = args.top_k * args.dim
    if kept_whole:
        attention = 4 * heads + 4 * kv
        if args.kv_lora_rank:
            attention = 8 * heads + 2 * args.n_heads * args.v_head_dim
        outputs = 0 if args.balance.score_before_w2 else 2 * rows
        experts = 6 * (shared + routed) + 2 * rows + outputs
        feed_forward, stream, statistics = max(6 * dense, experts), 8 * args.dim, 4 * args.n_heads + 8
    else:
        attention = 2 * heads + 4 * kv
        if args.kv_lora_rank:
            attention = 2 * heads + 2 * args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
        feed_forward = max(4 * dense, 4 * (shared + routed) + 2 * rows)
        stream, statistics = 4 * args.dim, 0
    per_token = stream + attention + 2 * latent_elements(args, recompute) + feed_forward
    return tokens * (half * per_token + statistics + router_bytes(args, element_bytes, recompute))


def latent_elements(args: ModelArgs, recompute: str) -> int:
    """Of latent attention, a token: the short vectors of keys (with the rotated part all heads share) and queries, and
    what their norms return; selective keeps the former only. 0 without it."""
    if not args.kv_lora_rank:
        return 0
    made = args.kv_lora_rank + args.qk_rope_head_dim + args.q_lora_rank
    return made if recompute == "selective" else made + args.kv_lora_rank + args.q_lora_rank


def router_bytes(args: ModelArgs, element_bytes: int, recompute: str) -> int:
    """Of a router, a token: its input in fp32, which is a copy unless all is computed in fp32 (selective makes it
    again), and one fp32 an expert: the scores, or with selective the logits. 0 in a dense block."""
    if not args.n_experts:
        return 0
    copied = recompute == "none" and element_bytes < 4
    return 4 * args.n_experts + (4 * args.dim if copied else 0)


def head_activation_bytes(
    args: ModelArgs,
    tokens: int,
    element_bytes: int,
    chunk_bytes: float,
    vocab_cut: int = 1,
    backward: bool = False,
) -> float:
    """What the head and the loss hold while the loss is made, or at the start of backward.

    Args:
        chunk_bytes: largest piece of the fp32 logits (training.loss_chunk_mib); 0 = all at once.
        vocab_cut: ranks that share the vocabulary.
        backward: logits are gone; the head's gradient is there as it was kept, and scaled: in fp32, and, if that is not
            the type computed with, in that type again.
    """
    vocab = args.vocab_size / vocab_cut
    logits = 4 * tokens * vocab
    chunked = bool(chunk_bytes) and logits > chunk_bytes
    piece = chunk_bytes if chunked else logits
    # the hidden states' gradient, and beside it their gathered rows (tensor ranks), or that gradient scaled
    hidden = 2 * tokens * args.dim * element_bytes
    if backward:
        return hidden + args.dim * vocab * (8 if element_bytes == 4 else 4 + 2 * element_bytes)
    # the head's gradient; logits in fp32 and in the compute type
    weight_gradient = (
        args.dim * vocab * (4 + element_bytes if chunked and element_bytes < 4 else element_bytes)
    )
    return hidden + weight_gradient + piece * (1 if element_bytes == 4 else 1 + element_bytes / 4)
