"""Sizes that a cluster would refuse are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from titan5d.dryrun.collectives import CheckedLedger
from titan5d.dryrun.fake import fake_world


def test_a_collective_whose_sizes_do_not_go_together_is_refused() -> None:
    with fake_world(1, 4), CheckedLedger({"all": dist.group.WORLD}) as ledger:
        dist.all_gather_into_tensor(torch.empty(8), torch.empty(2))
        dist.reduce_scatter_tensor(torch.empty(2), torch.empty(8))
        dist.all_to_all_single(torch.empty(8), torch.empty(8))
        dist.all_to_all_single(torch.empty(6), torch.empty(3), [6, 0, 0, 0], [0, 3, 0, 0])
        with pytest.raises(
            ValueError, match=r"all_gather over 4 ranks: 9 elements of output \(9,\) are not 4 x the 2"
        ):
            dist.all_gather_into_tensor(torch.empty(9), torch.empty(2))
        with pytest.raises(ValueError, match=r"reduce_scatter over 4 ranks: 8 elements of input"):
            dist.reduce_scatter_tensor(torch.empty(3), torch.empty(8))
        with pytest.raises(ValueError, match=r"4 parts of in all 5 rows, but the output \(6,\) has 6"):
            dist.all_to_all_single(torch.empty(6), torch.empty(3), [5, 0, 0, 0], [0, 3, 0, 0])
        with pytest.raises(
            ValueError, match=r"the 7 rows of the input \(7,\) do not divide into 4 equal parts"
        ):
            dist.all_to_all_single(torch.empty(8), torch.empty(7))
    assert ledger.total("all", "all_gather").tensor_bytes == 32


def test_a_process_with_ranks_of_its_own_makes_no_fake_world() -> None:
    with fake_world(0, 2), pytest.raises(RuntimeError, match="has one already"), fake_world(0, 2):
        pass
    assert not dist.is_initialized()
