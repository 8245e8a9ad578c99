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

from dataclasses import dataclass, fields
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
        return StateBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

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
    optimizer_bytes: int = 8,
    whole_gradients: bool = False,
    working_copy: bool = True,
) -> StateBytes:
    """Training state of `parameters` elements sharded over `shards` ranks.

    Args:
        parameters: elements this rank's group shares (all of the model without tensor or pipeline cuts).
        largest_unit: elements of the largest unit gathered at once.
        param_bytes, compute_bytes: per element as stored, as gathered.
        optimizer_bytes: per element; 8 for Adam, 4 for SGD with momentum or Muon, 0 for plain SGD.
        whole_gradients: each rank sums its gradients over micro-batches before they are reduced.
        working_copy: False for one rank that computes in the type it stores.
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
        buffers=largest_unit * (compute_bytes + REDUCE_BYTES) if working_copy else 0,
    )


def layer_activation_bytes(args: ModelArgs, tokens: int, element_bytes: int, recompute: str) -> float:
    """What one block keeps for backward, for `tokens` tokens of one micro-batch.

    none: A1 = T (8h + 4 n_h d + 4 n_kv d + 6f + 4 n_h + 8) bytes in bf16: the two inputs of the norms and what they
    return; rotated q, k, v and the attention's output; gate, up and their product (silu is computed again); fp32
    log-sum-exp of each head and scale of each norm.
    selective: outputs of the products, except the last one, which nothing needs again, and the block's input.
    full: the block's input.

    Of a block with experts, whose load is taken as even: f is the width of the shared experts, and k (3 f_e + 2 h)
    elements a token come on top, the rows of its k experts, their gate, up, product, and outputs; of these selective
    keeps k (2 f_e + h). Of dense and other blocks the larger counts.
    """
    heads = args.n_heads * args.head_dim
    kv = args.n_kv_heads * args.head_dim
    if recompute == "full":
        return tokens * args.dim * element_bytes
    half = element_bytes / 2
    shared, routed = args.n_shared_experts * args.moe_ffn_dim, args.top_k * args.moe_ffn_dim
    dense = args.ffn_dim if args.n_dense_layers or not args.n_experts else 0
    if recompute == "selective":
        feed_forward = max(4 * dense, 4 * (shared + routed) + 2 * args.top_k * args.dim)
        return tokens * half * (4 * args.dim + 2 * heads + 4 * kv + feed_forward)
    feed_forward = max(6 * dense, 6 * (shared + routed) + 4 * args.top_k * args.dim)
    per_token = 8 * args.dim + 4 * heads + 4 * kv + feed_forward
    return tokens * (half * per_token + 4 * args.n_heads + 8)


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
