"""The ring against a sum on one process, and what it costs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.ledger import CommunicationLedger, Traffic
from titan5d.parallel.gloo_reduce_scatter import GlooReduceScatter


def summand(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, Traffic]:
    mine = summand(dist.get_rank(), elements, dtype)
    piece, scatter = (
        torch.full((elements // dist.get_world_size(),), torch.nan, dtype=dtype),
        GlooReduceScatter(),
    )
    with CommunicationLedger({"world": dist.group.WORLD}) as ledger:
        scatter(piece, mine, dist.group.WORLD, dist.ReduceOp.SUM)
    assert [entry.op for entry in ledger.entries] == ["reduce_scatter"]  # its messages are not counted on top
    return piece, ledger.total()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_sum_of_its_pieces(ranks: int, dtype: torch.dtype) -> None:
    elements = 60 * 7
    whole = sum(summand(rank, elements, dtype).double() for rank in range(ranks))
    expected = whole.chunk(ranks)
    for rank, (piece, traffic) in enumerate(run_ranks(reduced, ranks, elements, dtype)):
        tolerance = 1e-6 if dtype == torch.float32 else 2**-6
        torch.testing.assert_close(piece.double(), expected[rank], atol=tolerance, rtol=tolerance)
        size = elements * dtype.itemsize
        assert traffic == Traffic(1, size * (ranks - 1) / ranks, size)


def test_what_it_cannot_do_is_refused() -> None:
    piece, whole = torch.zeros(2), torch.zeros(4)
    for operation, later in ((dist.ReduceOp.AVG, False), (dist.ReduceOp.SUM, True)):
        with pytest.raises(ValueError, match="only a sum"):
            GlooReduceScatter()(piece, whole, None, operation, later)  # type: ignore[arg-type]
