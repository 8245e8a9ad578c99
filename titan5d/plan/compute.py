"""How long one rank computes: products by their shape, attention by its length, the rest by the bytes it moves.

    product (M, K) x (K, N)     2 M N K / (peak x gemm x of the tiles' last round x of the loop over K)
    attention                   FLOPs of the live half of the square / (peak x share x s / (s + ramp))
    norms, rotary, SwiGLU, ...  bytes / (memory bandwidth x share), times `eager_traffic` without torch.compile

Tiles of 128 x 128: a product with few of them leaves multiprocessors idle in its last round, what sticks out of whole
tiles is computed in vain, and the start and the end of each loop over K cost as much as 128 steps of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan5d.hardware import Device
from titan5d.plan.assumptions import Assumptions
from titan5d.plan.case import Case

TILE = 128
LAUNCH = 4e-6
"""Seconds a kernel takes at least."""


@dataclass(frozen=True)
class BlockTime:
    """Seconds of computing on one micro-batch in one block, without communication.

    Attributes:
        forward; input_grad (I) and weight_grad (W), which backward is together; again: the forward that backward
        repeats.
        attention: of the forward, the core that hides a ring's hops.
        shared_experts: of the forward, what hides the rows on their way to the experts.
    """

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    again: float = 0.0
    attention: float = 0.0
    shared_experts: float = 0.0

    @property
    def backward(self) -> float:
        return self.input_grad + self.weight_grad + self.again


@dataclass(frozen=True)
class Computer:
    """One device."""

    device: Device
    assumptions: Assumptions

    def peak(self, element: int) -> float:
        """FLOP/s of products of elements of so many bytes."""
        if element == 4:
            return self.device.fp32_flops
        return self.device.bf16_flops or self.device.fp16_flops

    def product(self, m: float, n: float, k: float, element: int, count: float = 1.0) -> float:
        """Seconds of `count` products (m, k) x (k, n), one kernel."""
        if m <= 0:
            return 0.0
        tiles = count * -(-m // TILE) * -(-n // TILE)
        last_round = tiles / (tiles + self.assumptions.multiprocessors / 4)
        loop = k / (k + TILE)
        edges = (m / (-(-m // TILE) * TILE)) * (n / (-(-n // TILE) * TILE))
        rate = self.peak(element) * self.assumptions.gemm * last_round * loop * edges
        moved = count * element * (m * k + k * n + m * n) / self.memory_bandwidth
        return max(2 * m * n * k * count / rate, moved, LAUNCH)

    @property
    def memory_bandwidth(self) -> float:
        return self.device.memory_bandwidth * self.assumptions.memory

    def attention(self, flops: float, seq_len: float, element: int, backward: bool) -> float:
        """Seconds of fused attention over rows of `seq_len`."""
        share = self.assumptions.attention_backward if backward else self.assumptions.attention_forward
        ramp = seq_len / (seq_len + self.assumptions.attention_ramp)
        return max(flops / (self.peak(element) * share * ramp), LAUNCH)

    def between(self, moved: float, compiled: bool) -> float:
        """Seconds of kernels that read and write `moved` bytes when fused."""
        return moved * (1.0 if compiled else self.assumptions.eager_traffic) / self.memory_bandwidth


def block_time(case: Case, computer: Computer, with_experts: bool) -> BlockTime:
    """One block on one rank. Of experts the fullest rank, `load_imbalance` over the mean."""
    args, topology = case.args, case.topology
    tp, element, tokens = topology.tp, case.element, case.tokens
    forward = input_grad = weight_grad = last = 0.0

    def products(m: float, shapes: Sequence[tuple[float, float]], count: float = 1.0) -> float:
        """Adds products of m rows with weights (n, k); returns their forward."""
        nonlocal forward, input_grad, weight_grad
        ahead = 0.0
        for n, k in shapes:
            slow = 1.0 if count == 1 else 1 / computer.assumptions.grouped_gemm
            ahead += slow * computer.product(m, n, k, element, count)
            input_grad += slow * computer.product(m, k, n, element, count)
            weight_grad += slow * computer.product(n, k, m, element, count)
        forward += ahead
        return ahead

    products(tokens, attention_shapes(case))
    shared = 0.0
    if with_experts:
        rows = args.top_k * tokens / tp * computer.assumptions.load_imbalance
        here, slices = args.n_experts / topology.ep, topology.etp
        # rows of all ep x etp ranks meet, and this rank has a slice of 1/ep of the experts
        each, slice_width = slices * rows / here, args.moe_ffn_dim / slices
        products(tokens / tp, [(args.n_experts, args.dim)])
        wide = args.n_shared_experts * args.moe_ffn_dim / tp
        if wide:
            shared = products(tokens, [(wide, args.dim), (wide, args.dim), (args.dim, wide)])
        products(each, [(slice_width, args.dim)] * 2 + [(args.dim, slice_width)], here)
        between = rows * (6 * args.moe_ffn_dim + 8 * args.dim) / 2 * element
        if slices > 1:  # rows are repeated, and what comes back is summed
            between += rows * 2 * (slices + 1) * args.dim * element
    else:
        wide = args.ffn_dim / tp
        products(tokens, [(wide, args.dim), (wide, args.dim)])
        last = products(tokens, [(args.dim, wide)])
        between = 0.0
    between += tokens * 6 * wide / 2 * element
    heads = (args.n_heads + max(args.n_kv_heads, tp)) * args.head_dim / tp
    between += (tokens * 4 * heads + case.stream_tokens * 20 * args.dim) / 2 * element
    between_forward = computer.between(between, case.compiled)
    between_backward = 1.4 * between_forward  # reads its inputs and the gradient, writes the gradient of each

    flops = attention_flops(case)
    core = computer.attention(flops, case.seq_len, element, backward=False)
    core_backward = computer.attention(2.5 * flops, case.seq_len, element, backward=True)
    products_forward = forward
    forward += core + between_forward
    mode, share = case.recompute.mode, case.recompute.share
    again = {
        "none": 0.0,
        "selective": core + between_forward,
        "full": products_forward - last + core + between_forward,  # a block's last product is not made again
    }[mode]
    return BlockTime(
        forward=forward,
        input_grad=input_grad + core_backward + between_backward,
        weight_grad=weight_grad,
        again=share * again,
        attention=core,
        shared_experts=shared,
    )


def attention_shapes(case: Case) -> list[tuple[float, float]]:
    """(outputs, inputs) of the projections of one rank."""
    args, tp = case.args, case.topology.tp
    heads = args.n_heads * args.head_dim / tp
    if args.kv_lora_rank:
        down = args.kv_lora_rank + args.qk_rope_head_dim
        up = args.n_heads / tp * (args.qk_nope_head_dim + args.v_head_dim)
        queries = (
            [(args.q_lora_rank, args.dim), (heads, args.q_lora_rank)]
            if args.q_lora_rank
            else [(heads, args.dim)]
        )
        out = (args.dim, args.n_heads * args.v_head_dim / tp)
        return [*queries, (down, args.dim), (up, args.kv_lora_rank), out]
    kv = max(args.n_kv_heads / tp, 1) * args.head_dim
    return [(heads, args.dim), (kv, args.dim), (kv, args.dim), (args.dim, heads)]


def attention_flops(case: Case) -> float:
    """Forward FLOPs of one block's causal attention on the fullest rank, two products a pair."""
    args, topology = case.args, case.topology
    width = args.head_dim + (args.v_head_dim if args.kv_lora_rank else args.head_dim)
    pairs = case.rows * case.seq_len**2 / 2 / topology.cp
    if topology.cp > 1 and not case.balanced_context:
        pairs *= (2 * topology.cp - 1) / topology.cp  # the last rank sees nearly all keys
    return 2 * args.n_heads / topology.tp * width * pairs


def head_time(case: Case, computer: Computer) -> BlockTime:
    """Norm, head and loss of one micro-batch: the head's three products are all made in forward (cross_entropy.py)."""
    args, tp = case.args, case.topology.tp
    vocab = args.vocab_size / tp
    chunks = 1.0
    if case.loss_chunk and 4 * case.tokens * vocab > case.loss_chunk:
        chunks = 4 * case.tokens * vocab / case.loss_chunk
    rows = case.tokens / chunks
    element = case.element
    products = (
        computer.product(rows, vocab, args.dim, element)
        + computer.product(rows, args.dim, vocab, element)
        + computer.product(vocab, args.dim, rows, element)
    )
    logits = (
        case.tokens * vocab * (2 * element + 7 * 4)
    )  # made, widened, five passes of the softmax, narrowed
    added = (
        chunks * args.dim * vocab * 8 if chunks > 1 else 0.0
    )  # each chunk's share of the weight's gradient, fp32
    return BlockTime(forward=chunks * products + computer.between(logits + added, compiled=True))


def update_time(case: Case, computer: Computer, elements: float) -> float:
    """The optimizer's pass over `elements` parameters of this rank: reads all, writes all but the gradient."""
    moved = elements * (case.stored * 3 + 2 * case.optimizer)
    if case.offload:  # over the host's link and memory
        return moved / 30e9
    return moved / computer.memory_bandwidth
