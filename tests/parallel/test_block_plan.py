"""The plan computes every live pair once, nothing else, and K/V travel exactly as far as needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.parallel.attention_parity import DOCUMENTS, live_mask
from titan5d.parallel.block_plan import Block, plan_ring, prepare_documents
from titan5d.parallel.zigzag import SequenceCut, live_pairs


def computed_pairs(block: Block, batch: int, q_len: int, k_len: int) -> Tensor:
    """How often the block computes each pair: (B, Lq, Lk)."""
    pairs = torch.zeros(batch * q_len, batch * k_len, dtype=torch.int64)
    number_q = torch.arange(batch * q_len).view(batch, q_len)
    number_k = torch.arange(batch * k_len).view(batch, k_len)
    q_rows, k_rows = block.q.take(number_q), block.k.take(number_k)
    if block.spans is None:
        spans = [(q_rows[b], k_rows[b]) for b in range(batch)]
    else:
        q, k = block.spans.q, block.spans.k
        spans = [(q_rows[0, q[n] : q[n + 1]], k_rows[0, k[n] : k[n + 1]]) for n in range(len(q) - 1)]
    for q_span, k_span in spans:
        live = torch.ones(len(q_span), len(k_span), dtype=torch.int64)
        pairs[q_span[:, None], k_span[None, :]] += live.tril() if block.causal else live
    whole = pairs.view(batch, q_len, batch, k_len)
    rows = torch.arange(batch)
    within = whole[rows, :, rows]  # (B, Lq, Lk)
    assert within.sum() == pairs.sum(), "a pair of two different rows"
    return within


def check_plan(cut: SequenceCut, documents: Tensor | None, batch: int, seq_len: int) -> None:
    mask = live_mask(seq_len, documents)[:, 0].expand(batch, -1, -1)
    local_len = seq_len // cut.degree
    plans = [plan_ring(cut, r, batch, local_len, prepare_documents(documents)) for r in range(cut.degree)]
    live = torch.zeros(cut.degree, cut.degree, dtype=torch.bool)
    for rank, plan in enumerate(plans):
        for step, block in enumerate(plan.blocks):
            owner = plan.owner(step)
            expected = mask[:, cut.positions(rank, seq_len)][:, :, cut.positions(owner, seq_len)].long()
            live[rank, owner] = expected.any()
            assert (block is not None) == bool(expected.any()), "computed if and only if a pair is live"
            if block is not None:
                assert torch.equal(computed_pairs(block, batch, local_len, local_len), expected)
                assert plan.is_here(step)
                if block.spans is not None:  # no query without a key, no empty document
                    assert all(
                        torch.tensor(bounds).diff().min() > 0 for bounds in (block.spans.q, block.spans.k)
                    )
    for owner in range(cut.degree):
        needed = [step for step in range(cut.degree) if live[(owner + step) % cut.degree, owner]]
        assert all(plan.hops[owner] == max(needed) for plan in plans), (
            "all ranks agree, and no hop is for nothing"
        )


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("balancer", ["headtail", "none"])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_every_live_pair_is_computed_once(degree: int, balancer, name: str):
    check_plan(SequenceCut(degree, balancer), DOCUMENTS[name], batch=2, seq_len=32)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 5, 8]),
    st.sampled_from(["headtail", "none"]),
    st.lists(st.sets(st.integers(1, 119), max_size=12), min_size=1, max_size=3),
)
def test_any_documents_on_any_number_of_ranks(degree: int, balancer, boundaries: list[set[int]]):
    seq_len = 240 if degree == 5 else 48 * degree
    begins = torch.zeros(len(boundaries), seq_len, dtype=torch.int32)
    for row, positions in enumerate(boundaries):
        begins[row, [p for p in positions if p < seq_len]] = 1
    check_plan(SequenceCut(degree, balancer), begins.cumsum(1).int(), len(boundaries), seq_len)


def test_a_row_of_one_document_takes_the_dense_path():
    plan = plan_ring(SequenceCut(2), 0, 2, 16, DOCUMENTS["one"])
    assert all(block is not None and block.spans is None for block in plan.blocks)


def test_work_of_documents_is_their_own_pairs_only():
    """Halving documents halves the work: nothing is computed and then masked away."""
    cut = SequenceCut(2)
    whole, halves = DOCUMENTS["one"], DOCUMENTS["at chunk edges"]
    counts = [
        sum(live_pairs(cut, q, k, 32, documents) for q in range(2) for k in range(2))
        for documents in (whole, halves)
    ]
    assert counts == [2 * 32 * 33 // 2, 4 * 36 + 10 + 78 + 78 + 10]


def test_contiguous_pieces_travel_only_to_later_ranks():
    assert plan_ring(SequenceCut(4, "none"), 0, 1, 8, None).hops == (3, 2, 1, 0)
    assert plan_ring(SequenceCut(4), 0, 1, 8, None).hops == (3, 3, 3, 3)


def test_refusals_name_the_numbers():
    documents = torch.zeros(2, 16, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"shape \(2, 16\), but 2 rows of 16 tokens on each of 2 .* need \(2, 32\)"
    ):
        plan_ring(SequenceCut(2), 0, 2, 16, documents)
    with pytest.raises(ValueError, match="int64 on cpu; int32 on the CPU is needed"):
        plan_ring(SequenceCut(2), 0, 2, 8, documents.long())
    with pytest.raises(ValueError, match="seq_len = 6 cannot be cut into 2 x 2 chunks"):
        plan_ring(SequenceCut(2), 0, 2, 3, None)
    with pytest.raises(ValueError, match="row 1 has 3 runs of equal ids but only 2 different ids"):
        prepare_documents(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]))
    assert prepare_documents(None) is None
    assert prepare_documents(documents.long()).dtype == torch.int32
