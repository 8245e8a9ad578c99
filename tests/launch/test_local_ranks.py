from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titan5d.launch.local_ranks import RankFailed, run_ranks


def _sum() -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return dist.get_rank(), float(value)


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(_sum, 4) == [(rank, 10.0) for rank in range(4)]


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()  # would wait for rank 1 for ever


def test_the_failing_rank_is_named_and_the_others_are_ended() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: ValueError: the reason"):
        run_ranks(_one_raises, 2)
    assert time.monotonic() - started < 30


def _one_dies() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 0 of 2 died without a word"):
        run_ranks(_one_dies, 2)


def _hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_a_hang_ends_at_the_time_limit() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[1\] of 2 had not ended after 2 s"):
        run_ranks(_hangs, 2, timeout=2)


def test_no_process_is_left() -> None:
    before = _children()
    run_ranks(_sum, 2)
    assert _children() == before


def _children() -> set[str]:
    """Processes this one has started and not taken leave of; other tests may have left some."""
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}
