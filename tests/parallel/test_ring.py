"""The ring against one process's full attention, what it sends, when, and what it holds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parallel.attention_parity import (
    DOCUMENTS,
    Inputs,
    ThreadRing,
    documents_from,
    full_attention,
    random_inputs,
    relative_errors,
)
from titan5d.launch.local_ranks import RankFailed, run_ranks
from titan5d.parallel.attention_blocks import CpuFlash
from titan5d.parallel.block_plan import Spans, plan_ring
from titan5d.parallel.ring import RingAttention, Wait, ring_attention, ring_backward, ring_forward
from titan5d.parallel.zigzag import LoadBalancer, SequenceCut


def assert_parity(found: dict[str, Tensor], inputs: Inputs) -> None:
    errors = relative_errors(found, inputs)
    assert errors["out"] < 1e-6, errors
    assert max(errors.values()) < 2e-6, errors


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("balancer", ["headtail", "none"])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_parity(degree: int, balancer: LoadBalancer, kv_heads: int, name: str):
    inputs = random_inputs(DOCUMENTS[name], kv_heads=kv_heads)
    assert_parity(ThreadRing(SequenceCut(degree, balancer)).run(inputs), inputs)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([2, 3, 4, 6]),
    st.sampled_from(["headtail", "none"]),
    st.lists(st.sets(st.integers(1, 47), max_size=8), min_size=1, max_size=2),
)
def test_parity_and_no_hang_for_any_documents(degree: int, balancer, boundaries: list[set[int]]):
    begins = torch.zeros(len(boundaries), 48, dtype=torch.int32)
    for row, positions in enumerate(boundaries):
        begins[row, list(positions)] = 1
    inputs = random_inputs(begins.cumsum(1).int(), heads=2, kv_heads=1, seq_len=48, batch=len(boundaries))
    assert_parity(ThreadRing(SequenceCut(degree, balancer)).run(inputs), inputs)


@pytest.mark.parametrize("balancer", ["headtail", "none"])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("position", [0, 31])
def test_a_gradient_at_one_position_only(position: int, degree: int, balancer: LoadBalancer):
    """One valid target in the row: its gradient must reach all earlier keys, on whatever rank, undivided."""
    inputs = random_inputs(DOCUMENTS["causal"])
    keep = torch.zeros(1, 32, 1, 1)
    keep[:, position] = 1
    inputs = Inputs(inputs.q, inputs.k, inputs.v, inputs.grad_out * keep, None)
    assert_parity(ThreadRing(SequenceCut(degree, balancer)).run(inputs), inputs)


def test_scores_far_beyond_the_range_of_exp():
    inputs = random_inputs()
    inputs = Inputs(inputs.q * 300, inputs.k * 300, inputs.v, inputs.grad_out, None)
    found = ThreadRing(SequenceCut(4)).run(inputs)
    assert all(x.isfinite().all() for x in found.values())
    torch.testing.assert_close(found["out"].double(), full_attention(inputs)["out"], rtol=0, atol=2e-2)


def test_fp64_stays_fp64():
    inputs = random_inputs(DOCUMENTS["many"], dtype=torch.float64)
    assert max(relative_errors(ThreadRing(SequenceCut(4)).run(inputs), inputs).values()) < 1e-14


def test_bf16_error_does_not_grow_with_the_ring():
    def root_mean_square_errors(degree: int) -> dict[str, float]:
        inputs = random_inputs(seq_len=256, dtype=torch.bfloat16, head_dim=16)
        found, expected = ThreadRing(SequenceCut(degree)).run(inputs), full_attention(inputs)
        return {name: float((found[name] - x).norm() / x.norm()) for name, x in expected.items()}

    alone = root_mean_square_errors(1)
    for degree in (2, 4, 8):
        ring = root_mean_square_errors(degree)
        assert all(ring[name] < 1.3 * alone[name] for name in alone), (degree, ring, alone)


def test_results_are_bitwise_the_same_every_time():
    inputs = random_inputs(DOCUMENTS["many"])
    first, second = (ThreadRing(SequenceCut(4)).run(inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# What is sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_bytes_sent(degree: int, dtype: torch.dtype):
    """Forward 2 (T/c) n_kv d q (c - 1); backward the same again and the gradients in fp32 (q = 4), c - 1 hops."""
    inputs = random_inputs(dtype=dtype)
    ring = ThreadRing(SequenceCut(degree))
    ring.run(inputs)
    batch, seq_len, n_kv, head_dim = inputs.k.shape
    elements = 2 * (batch * seq_len // degree) * n_kv * head_dim * (degree - 1)
    assert ring.forward_bytes == [elements * dtype.itemsize] * degree
    assert ring.backward_bytes == [elements * (dtype.itemsize + 4)] * degree


def test_contiguous_pieces_send_nothing_backwards_in_the_row():
    """Rank i passes on the blocks of ranks 0..i: half the hops of a full ring, the last rank none."""
    inputs = random_inputs()
    ring = ThreadRing(SequenceCut(4, "none"))
    ring.run(inputs)
    message = 2 * inputs.k.nbytes // 4
    assert ring.forward_bytes == [1 * message, 2 * message, 3 * message, 0]


@pytest.mark.parametrize(("name", "hops"), [("inside chunks", [0, 0, 0, 0]), ("of length 1", [0, 0, 0, 0])])
def test_documents_within_a_chunk_send_nothing(name: str, hops: list[int]):
    inputs = random_inputs(DOCUMENTS[name])
    ring = ThreadRing(SequenceCut(4))
    assert_parity(ring.run(inputs), inputs)
    assert ring.forward_bytes == ring.backward_bytes == hops


def test_a_block_stops_at_the_last_rank_that_needs_it():
    """One document over chunks 1 and 2 of 8: only rank 2 needs the K/V of rank 1, one hop on and one back."""
    inputs = random_inputs(documents_from([[4, 8, 4, 4, 4, 4, 4]] * 2))
    ring = ThreadRing(SequenceCut(4))
    assert_parity(ring.run(inputs), inputs)
    message = 2 * inputs.k.nbytes // 4
    assert ring.forward_bytes == [0, message, 0, 0]
    assert ring.backward_bytes == [0, message, message, 0]


# When it is sent


class Slow:
    """A link and a kernel that take their time, by a clock of their own.

    A transfer begins when it is posted and runs beside everything else; waiting moves the clock to its end.
    """

    name = "slow"

    def __init__(self, transfer: float, compute: float) -> None:
        self.transfer, self.compute = transfer, compute
        self.now = 0.0
        self.events: list[str] = []

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Wait:
        if not sends and not receives:
            return lambda: None
        self.events.append("post")
        arrival = self.now + self.transfer

        def wait() -> None:
            self.pass_time(max(0.0, arrival - self.now))
            for x, _ in receives:
                x.zero_()
            self.events.append("arrived")

        return wait

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spans: Spans | None):
        self.pass_time(self.compute)
        self.events.append("computed")
        return CpuFlash().forward(q, k, v, causal, scale, spans)

    def backward(self, grad_out, q, k, v, out, lse, causal: bool, scale: float, spans: Spans | None):
        self.pass_time(self.compute)
        self.events.append("computed")
        return CpuFlash().backward(grad_out, q, k, v, out, lse, causal, scale, spans)


class Sleeping(Slow):
    """The same by the clock on the wall."""

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Wait:
        self.now = time.monotonic()
        return super().exchange(sends, receives)

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)
        self.now = time.monotonic()


def run_slow(slow: Slow, degree: int) -> tuple[float, float, list[str], list[str]]:
    """Time of the forward and of the backward of rank 1 by `slow`'s clock, and the events of each."""
    inputs = random_inputs()
    q, k, v, grad_out = (
        SequenceCut(degree).shard(x, 1) for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out)
    )
    plan = plan_ring(SequenceCut(degree), 1, *q.shape[:2], None)
    slow.pass_time(0.0)
    start = slow.now
    out, lse = ring_forward(q, k, v, plan, slow.exchange, slow, inputs.scale)
    middle, events = slow.now, list(slow.events)
    ring_backward(grad_out, q, k, v, out, lse, plan, slow.exchange, slow, inputs.scale)
    return middle - start, slow.now - middle, events, slow.events[len(events) :]


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize(("transfer", "compute"), [(3.0, 3.0), (1.0, 3.0), (3.0, 1.0)])
def test_transfer_runs_under_the_computation(transfer: float, compute: float, degree: int):
    """Of c computations and c - 1 transfers: max(transfer, compute) a step, not transfer + compute."""
    forward, backward, forward_events, backward_events = run_slow(Slow(transfer, compute), degree)
    assert forward == (degree - 1) * max(transfer, compute) + compute
    assert forward_events == ["post", "computed", "arrived"] * (degree - 1) + ["computed"]
    # The backward's last message, the gradients coming home, has nothing left to hide under.
    assert backward == (degree - 1) * max(transfer, compute) + compute + transfer
    assert backward_events[-2:] == ["post", "arrived"]
    # Gradients posted at a step are waited for only after the next step's computation.
    posted_then_computed = ["computed", "post", "arrived", "post", "computed", "arrived"]
    assert degree == 2 or backward_events[4:10] == posted_then_computed, backward_events


def test_transfer_runs_under_the_computation_by_the_clock_on_the_wall():
    """Sleeps of 50 ms: 200 ms each way hidden, 350 ms in turn. The best of five, since other work may delay any one."""
    best = min(run_slow(Sleeping(0.05, 0.05), degree=4)[0] for _ in range(5))
    assert 0.19 < best < 0.28


def test_nothing_is_waited_for_that_is_not_needed():
    inputs = random_inputs(DOCUMENTS["inside chunks"])
    slow = Slow(transfer=5.0, compute=1.0)
    q, k, v = (SequenceCut(4).shard(x, 1) for x in (inputs.q, inputs.k, inputs.v))
    plan = plan_ring(SequenceCut(4), 1, *q.shape[:2], inputs.documents)
    ring_forward(q, k, v, plan, slow.exchange, slow, inputs.scale)
    assert (slow.events, slow.now) == (["computed"], 1.0)


def _one_rank_stays_away() -> float:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 is done"])
        return 0.0
    inputs = random_inputs()
    q, k, v = (SequenceCut(2).shard(x, 0) for x in (inputs.q, inputs.k, inputs.v))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        RingAttention(group)(q, k, v)
    store.set("rank 0 is done", "")
    return time.monotonic() - start


def test_a_wait_ends_with_the_timeout_of_the_group():
    """One second for this group, where the group of all ranks has 45."""
    assert run_ranks(_one_rank_stays_away, 2, timeout=45)[0] < 20


def _fails_on_one_rank() -> None:
    inputs = random_inputs()
    q, k, v = (SequenceCut(2).shard(x, dist.get_rank()) for x in (inputs.q, inputs.k, inputs.v))
    documents = torch.zeros(2, 16, dtype=torch.int32)  # the piece's ids where the row's are wanted
    RingAttention(dist.group.WORLD)(q, k, v, documents)


def test_document_ids_of_the_piece_instead_of_the_row_are_refused():
    with pytest.raises(RankFailed, match=r"shape \(2, 16\), but 2 rows of 16 tokens .* need \(2, 32\)"):
        run_ranks(_fails_on_one_rank, 2, timeout=30)


# What it holds


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under this mode, beyond the given ones, held at any one time."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen = weakref.WeakSet(x.untyped_storage() for x in given)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage() not in self.seen:
                storage = x.untyped_storage()
                self.seen.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes


class Zeros:
    """A kernel that allocates what a kernel returns and computes nothing."""

    name = "zeros"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spans: Spans | None):
        return torch.zeros_like(q), q.new_zeros(q.shape[:-1], dtype=torch.float32)

    def backward(self, grad_out, q, k, v, out, lse, causal: bool, scale: float, spans: Spans | None):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _peak_bytes(degree: int, seq_len: int) -> tuple[int, int]:
    """Peak of forward and backward on one rank, beyond q, k, v and what else is passed in."""
    inputs = random_inputs(heads=4, kv_heads=4, seq_len=seq_len, batch=1)
    q, k, v, grad_out = (
        SequenceCut(degree).shard(x, 0) for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out)
    )
    plan = plan_ring(SequenceCut(degree), 0, *q.shape[:2], None)

    def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Wait:
        return lambda: None

    with LiveBytes(q, k, v) as forward:
        out, lse = ring_forward(q, k, v, plan, exchange, Zeros(), 1.0)
    with LiveBytes(q, k, v, grad_out, out, lse) as backward:
        ring_backward(grad_out, q, k, v, out, lse, plan, exchange, Zeros(), 1.0)
    return forward.peak, backward.peak


def test_memory_falls_with_the_ring():
    """At 8K tokens: as 1 / c, and a small multiple of one rank's q, k, v."""
    peaks = {degree: _peak_bytes(degree, 8192) for degree in (2, 4, 8)}
    piece = {degree: 8192 // degree * 4 * 8 * 4 for degree in peaks}  # bytes of a rank's q, or k, or v
    print(
        {c: [f"{x / 2**10:.0f} KiB = {x / piece[c]:.2f} pieces" for x in peak] for c, peak in peaks.items()}
    )
    assert peaks[8] == pytest.approx([x / 2 for x in peaks[4]], rel=0.01)
    # A ring of 2 has no later block in flight while it merges, so it holds less than twice what a ring of 4 does.
    assert all(half <= whole <= 2 * half for half, whole in zip(peaks[4], peaks[2], strict=True))
    assert all(peaks[c][0] < 8 * piece[c] and peaks[c][1] < 14 * piece[c] for c in peaks)


# As an operator


def test_operator_checks():
    """Schema, fake against real shapes, autograd registration, tracing: torch's own checks."""
    inputs = random_inputs(DOCUMENTS["many"])
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    for documents in (None, inputs.documents):
        torch.library.opcheck(ring_attention, (q, k, v, documents, False, None, inputs.scale))


def test_a_ring_of_one_is_attention():
    inputs = random_inputs(DOCUMENTS["many"])
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, _ = ring_attention(q, k, v, inputs.documents, False, None, inputs.scale)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs.grad_out)
    assert_parity({"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}, inputs)
