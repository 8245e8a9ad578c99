"""How many FLOPs a training step is, from the model's sizes alone. Pure Python: the planner uses it too.

A multiply-add is 2 FLOPs, the backward is twice the forward, so training is 3 x forward: 6 FLOPs for every
weight a token is multiplied with and, in attention, 12 for every channel of every (query, key) pair: 2 FLOPs
x 2 products (QK^T, PV) x 3. Everything else (norms, rotary, softmax, the embedding gather, the optimizer) is
left out, as in PaLM (arXiv:2204.02311, appendix B) and Megatron-LM (arXiv:2205.05198, appendix A).

    step = linear * tokens + quadratic * sum(l_i^2)            l_i: lengths of the documents attended within

            full: l^2 pairs        causal: half of them        window w: 2wl - w^2 of l^2, again halved
            # # # #                #                           #
            # # # #                # #                         # #
            # # # #                # # #                         # #
            # # # #                # # # #                         # #

Causal is our convention wherever one number is printed: only pairs inside the mask are work, so MFU never
passes 100% by counting. "full" charges the whole square, as TorchTitan and nanoGPT do, for comparing with
their figures. Counts are of the whole model: cuts and recompute do not change them. What recompute adds is in
the *hardware* FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Convention = Literal["causal", "full"]


@dataclass(frozen=True)
class MoeShape:
    """Sizes of the expert layers. Each token meets `top_k` experts, every shared one, and the router."""

    n_experts: int
    top_k: int
    expert_dim: int
    """Hidden width of one routed expert."""
    shared_dim: int = 0
    """Hidden width of all shared experts together."""
    n_dense_layers: int = 0
    """Leading layers that keep a dense feed-forward of width `ffn_dim`."""


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values of low rank."""

    q_rank: int
    """0 when queries are projected straight from the hidden state."""
    kv_rank: int
    nope_dim: int
    """Channels of a query head without rotary; `rope_dim` with it; `v_dim` of a value head."""
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class FlopShape:
    """The sizes that decide a decoder's FLOPs; a tied head is still a product, so tying is not among them."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    """Hidden width of the SwiGLU feed-forward: three matrices of dim x ffn_dim."""
    vocab_size: int
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    sliding_window: int | None = None
    """A query sees itself and the `sliding_window - 1` tokens before it."""
    n_window_layers: int | None = None
    """How many layers have the window; None: all, when there is one."""
    n_mtp: int = 0
    """Multi-token-prediction modules (arXiv:2412.19437, 2.2): each a layer, a 2*dim x dim joint, the head."""


@dataclass(frozen=True)
class Work:
    """What a step computes on, over all its micro-batches and ranks. Adds up, so ranks can sum theirs."""

    tokens: int
    squares: int
    """Sum over documents of the squared length; a row without document ids is one document."""
    window_squares: int = 0
    """The same inside a sliding window: l^2 for l <= w, else 2wl - w^2, twice the causal pairs."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.squares + other.squares,
            self.window_squares + other.window_squares,
        )


@dataclass(frozen=True)
class Recompute:
    """Which share of the blocks' forward runs again in the backward: 0 none, 1 all.

    `Recompute(k / n_layers, k / n_layers)` when k whole blocks are checkpointed, `Recompute(0.0, 1.0)` when
    only the attention core is (arXiv:2205.05198, 5). The head is never recomputed. What a fused attention
    kernel recomputes inside its own backward is not counted: it does so on every run alike.
    """

    matmuls: float = 0.0
    attention: float = 0.0


NO_RECOMPUTE = Recompute()
FULL_RECOMPUTE = Recompute(matmuls=1.0, attention=1.0)


@dataclass(frozen=True)
class TrainingFlops:
    """The coefficients of one model. All FLOPs are for the whole model, forward and backward."""

    block_params: int
    """Weights one token is multiplied with inside the blocks (of the experts: only those it is sent to)."""
    head_params: int
    """The same for the output head, embedding gather excluded."""
    pair_flops: int
    """FLOPs of one (query, key) pair, summed over the layers with full attention."""
    window_pair_flops: int = 0
    """The same, summed over the layers with a sliding window."""
    window: int | None = None

    @property
    def linear(self) -> float:
        """FLOPs per token outside attention."""
        return 6.0 * (self.block_params + self.head_params)

    @property
    def quadratic(self) -> float:
        """FLOPs per squared document length, causal: half the pairs."""
        return self.pair_flops / 2

    @property
    def window_quadratic(self) -> float:
        """FLOPs per unit of `Work.window_squares`, causal."""
        return self.window_pair_flops / 2

    def per_token(self, seq_len: int, convention: Convention = "causal") -> float:
        """Model FLOPs per token of documents of `seq_len` tokens."""
        if convention == "full":
            seen = min(seq_len, self.window) if self.window is not None else seq_len
            return self.linear + self.pair_flops * seq_len + self.window_pair_flops * seen
        return self.model_flops(work_of([seq_len], self.window)) / seq_len

    def model_flops(self, work: Work) -> float:
        """Model FLOPs of a step (causal): what MFU divides. The same whatever is recomputed.

        Raises ValueError when the model has a sliding window and the work was summed without it.
        """
        return self.linear * work.tokens + self._attention_flops(work)

    def hardware_flops(self, work: Work, recompute: Recompute = NO_RECOMPUTE) -> float:
        """Model FLOPs plus the forwards that run a second time: what HFU divides.

        Full recompute turns the 6 FLOPs per weight of the blocks into 8 and attention into 4/3 of itself; the
        head stays at 6.
        """
        matmuls_forward = 2 * self.block_params * work.tokens
        attention_forward = self._attention_flops(work) / 3
        again = recompute.matmuls * matmuls_forward + recompute.attention * attention_forward
        return self.model_flops(work) + again

    def _attention_flops(self, work: Work) -> float:
        if self.window_pair_flops and work.tokens and not work.window_squares:
            raise ValueError(
                f"the model has a sliding window of {self.window}, but the work of these {work.tokens} tokens"
                f" was summed without one; pass window={self.window} to work_of or work_of_rows"
            )
        return self.quadratic * work.squares + self.window_quadratic * work.window_squares


def work_of(lengths: Iterable[int], window: int | None = None) -> Work:
    """The work of documents with these lengths, e.g. `work_of([seq_len] * batch)` for unpacked rows."""
    tokens = squares = window_squares = 0
    for length in lengths:
        tokens += length
        squares += length * length
        if window is not None:
            window_squares += windowed_square(length, window)
    return Work(tokens, squares, window_squares)


def windowed_square(length: int, window: int) -> int:
    """Twice the causal pairs of a document under a window of w: l^2, or 2wl - w^2 when longer than w."""
    return length * length if length <= window else 2 * window * length - window * window


def flops_per_token(shape: FlopShape, seq_len: int, convention: Convention = "causal") -> float:
    """Training FLOPs per token at one document length: the number of the papers' tables."""
    return training_flops(shape).per_token(seq_len, convention)


def training_flops(shape: FlopShape) -> TrainingFlops:
    """The coefficients for a model of this shape."""
    n_layers = shape.n_layers + shape.n_mtp
    feed_forward = _feed_forward_params(shape, n_layers)
    joints = shape.n_mtp * 2 * shape.dim * shape.dim  # each joins the hidden state and the next embedding

    # FLOPs of a pair in one layer: 6 per channel of Q.K and 6 per channel of P.V
    if shape.mla is not None:
        pair = 6 * shape.n_heads * (shape.mla.nope_dim + shape.mla.rope_dim + shape.mla.v_dim)
    else:
        pair = 12 * shape.n_heads * shape.head_dim
    n_window = 0
    if shape.sliding_window is not None:
        n_window = n_layers if shape.n_window_layers is None else shape.n_window_layers

    return TrainingFlops(
        block_params=n_layers * _attention_params(shape) + feed_forward + joints,
        head_params=(1 + shape.n_mtp) * shape.dim * shape.vocab_size,
        pair_flops=pair * (n_layers - n_window),
        window_pair_flops=pair * n_window,
        window=shape.sliding_window if n_window else None,
    )


def _attention_params(shape: FlopShape) -> int:
    """Projection weights of one attention layer."""
    mla = shape.mla
    if mla is None:
        qkv = shape.dim * (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
        return qkv + shape.n_heads * shape.head_dim * shape.dim
    q_width = shape.n_heads * (mla.nope_dim + mla.rope_dim)
    queries = mla.q_rank * (shape.dim + q_width) if mla.q_rank else shape.dim * q_width
    keys_values = shape.dim * (mla.kv_rank + mla.rope_dim)
    keys_values += mla.kv_rank * shape.n_heads * (mla.nope_dim + mla.v_dim)
    return queries + keys_values + shape.n_heads * mla.v_dim * shape.dim


def _feed_forward_params(shape: FlopShape, n_layers: int) -> int:
    """Feed-forward weights one token meets in all layers together."""
    moe = shape.moe
    if moe is None:
        return n_layers * 3 * shape.dim * shape.ffn_dim
    experts = 3 * shape.dim * (moe.top_k * moe.expert_dim + moe.shared_dim)
    router = shape.dim * moe.n_experts
    dense = moe.n_dense_layers * 3 * shape.dim * shape.ffn_dim
    return dense + (n_layers - moe.n_dense_layers) * (experts + router)


def flop_shape(args: object) -> FlopShape:
    """Reads the sizes off a model's arguments by attribute name; optional parts may be absent, None or 0.

    Needed: dim, n_layers, n_heads, n_kv_heads, head_dim, ffn_dim, vocab_size. With n_experts: top_k,
    moe_ffn_dim, shared_ffn_dim or n_shared_experts, n_dense_layers. With kv_lora_rank: q_lora_rank,
    qk_nope_head_dim, qk_rope_head_dim, v_head_dim. Also sliding_window, n_window_layers, n_mtp.

    Raises AttributeError naming the size that is missing.
    """

    def needed(name: str) -> int:
        value = getattr(args, name, None)
        if value is None:
            raise AttributeError(f"cannot count FLOPs: {type(args).__name__} has no {name}")
        return int(value)

    def optional(name: str) -> int:
        return int(getattr(args, name, None) or 0)

    moe = mla = None
    if optional("n_experts"):
        expert_dim = needed("moe_ffn_dim")
        moe = MoeShape(
            n_experts=optional("n_experts"),
            top_k=needed("top_k"),
            expert_dim=expert_dim,
            shared_dim=optional("shared_ffn_dim") or optional("n_shared_experts") * expert_dim,
            n_dense_layers=optional("n_dense_layers"),
        )
    if optional("kv_lora_rank"):
        mla = MlaShape(
            q_rank=optional("q_lora_rank"),
            kv_rank=optional("kv_lora_rank"),
            nope_dim=needed("qk_nope_head_dim"),
            rope_dim=needed("qk_rope_head_dim"),
            v_dim=needed("v_head_dim"),
        )
    return FlopShape(
        dim=needed("dim"),
        n_layers=needed("n_layers"),
        n_heads=needed("n_heads"),
        n_kv_heads=needed("n_kv_heads"),
        head_dim=needed("head_dim"),
        ffn_dim=needed("ffn_dim"),
        vocab_size=needed("vocab_size"),
        moe=moe,
        mla=mla,
        sliding_window=optional("sliding_window") or None,
        n_window_layers=getattr(args, "n_window_layers", None),
        n_mtp=optional("n_mtp"),
    )
