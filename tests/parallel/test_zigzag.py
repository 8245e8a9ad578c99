"""The cutting rule, and the proof that it balances causal attention."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.attention_parity import DOCUMENTS, live_mask
from titan5d.parallel.zigzag import LoadBalancer, SequenceCut, document_starts, live_pairs

CUTS = [SequenceCut(degree, balancer) for degree in (1, 2, 4, 8) for balancer in ("headtail", "none")]


def test_zigzag_gives_rank_i_the_chunks_i_and_2n_minus_1_minus_i():
    cut = SequenceCut(4)
    assert [cut.chunks_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert cut.positions(1, 16).tolist() == [2, 3, 12, 13]
    assert SequenceCut(4, "none").positions(1, 16).tolist() == [4, 5, 6, 7]
    assert SequenceCut(1).positions(0, 5).tolist() == [0, 1, 2, 3, 4]  # one rank: no cut, any length


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_positions_of_all_ranks_are_the_row_and_ascend(cut: SequenceCut):
    held = [cut.positions(rank, 32) for rank in range(cut.degree)]
    assert torch.cat(held).sort().values.tolist() == list(range(32))
    assert all((positions.diff() > 0).all() for positions in held)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_shard_takes_the_positions_and_unshard_is_its_inverse(cut: SequenceCut):
    row = torch.arange(2 * 32 * 3).view(2, 32, 3)
    pieces = [cut.shard(row, rank) for rank in range(cut.degree)]
    for rank, piece in enumerate(pieces):
        assert torch.equal(piece, row[:, cut.positions(rank, 32)])
    assert torch.equal(cut.unshard(pieces), row)
    by_last = [cut.shard(row.transpose(1, 2), rank, dim=-1) for rank in range(cut.degree)]
    assert torch.equal(cut.unshard(by_last, dim=-1), row.transpose(1, 2))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_local_index_counts_the_positions_below(cut: SequenceCut):
    at = torch.arange(33)
    for rank in range(cut.degree):
        below = (cut.positions(rank, 32)[None] < at[:, None]).sum(1)
        assert torch.equal(cut.local_index(rank, at, 32), below)


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_live_pairs_are_those_of_the_mask(cut: SequenceCut, name: str):
    mask = live_mask(32, DOCUMENTS[name])[:, 0]
    for q_rank in range(cut.degree):
        for kv_rank in range(cut.degree):
            block = mask[:, cut.positions(q_rank, 32)][:, :, cut.positions(kv_rank, 32)]
            assert live_pairs(cut, q_rank, kv_rank, 32, DOCUMENTS[name]) == int(block.sum())


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_zigzag_is_balanced_at_every_ring_step_and_the_naive_cut_is_not(degree: int):
    seq_len = 64 * degree

    def by_step(balancer: LoadBalancer) -> list[list[int]]:
        cut = SequenceCut(degree, balancer)
        return [
            [live_pairs(cut, rank, (rank - step) % degree, seq_len) for rank in range(degree)]
            for step in range(degree)
        ]

    zigzag, naive = by_step("headtail"), by_step("none")
    chunk = seq_len // (2 * degree)
    assert zigzag[0] == [chunk * (2 * chunk + 1)] * degree  # a triangle of 2 chunks
    assert zigzag[1:] == [[2 * chunk * chunk] * degree] * (degree - 1)  # a rectangle of 2 x 1 chunks
    assert sum(map(sum, zigzag)) == sum(map(sum, naive)) == seq_len * (seq_len + 1) // 2
    # Each naive step lasts as long as its busiest rank: 2c - 1 chunk-pairs of work where c are needed.
    busiest = [sum(max(ranks) for ranks in steps) for steps in (zigzag, naive)]
    assert busiest[1] / busiest[0] == pytest.approx((2 * degree - 1) / degree, rel=0.02)
    totals = [sum(step[rank] for step in naive) for rank in range(degree)]
    assert totals[-1] / totals[0] == pytest.approx(2 * degree - 1, rel=0.03)
    print(f"cp {degree}: pairs by rank, zig-zag {sum(s[0] for s in zigzag)} each; contiguous {totals}")


def test_document_starts():
    ids = torch.tensor([[4, 4, 9, 9, 9, 1], [0, 1, 2, 3, 3, 3]])
    assert document_starts(ids).tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 2, 3, 3, 3]]


def test_refusals_name_the_numbers_and_what_would_work():
    with pytest.raises(ValueError, match=r"seq_len = 66 .* 2 x 4 chunks .* multiple of 8, such as 64 or 72"):
        SequenceCut(4).chunk_len(66)
    with pytest.raises(ValueError, match=r"seq_len = 3 .* 4 pieces .* such as 4 or 4"):
        SequenceCut(4, "none").chunk_len(3)
    with pytest.raises(ValueError, match="context_parallel_degree = 0"):
        SequenceCut(0)
    with pytest.raises(ValueError, match="context_parallel_load_balancer = 'zigzag'"):
        SequenceCut(2, "zigzag")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 pieces were given for context_parallel_degree = 4"):
        SequenceCut(4).unshard([torch.zeros(1, 4)] * 3)
