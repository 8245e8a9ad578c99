"""Ranks that hang, fail, stop or disagree: the verdict names rank, axis, op and place; every process ends by itself."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

from tests.launch.forked import Ended, fork_ranks
from titan5d.launch import watchdog as watchdog_module
from titan5d.launch.diagnose import main as diagnose
from titan5d.launch.watchdog import Progress, Watchdog

LIMIT = 2.0
"""Seconds a collective may take."""
Groups = dict[str, dist.ProcessGroup]


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "GRACE", 2.0)


def watched(case: Callable[[int, Groups], None], folder: Path, world: int, **more: object) -> list[Ended]:
    """Runs `case(rank, groups)` on ranks cut into dp x tp, tp 2, each with its watchdog; how they ended."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        groups = {"dp": mesh.get_group("dp"), "tp": mesh.get_group("tp")}
        traces = folder / "run" / "comm_traces" / "1"
        watchdog = Watchdog(traces, "rank_", rank, world, LIMIT, 1000, "cpu")
        watchdog.start()
        begun = time.monotonic()
        watchdog.watch(groups, lambda: Progress(7, "backward", begun, LIMIT))
        try:
            for group in groups.values():
                dist.all_reduce(torch.ones(3), group=group)
            case(rank, groups)
            dist.barrier()
        except Exception as error:
            watchdog.failed(error)
            raise
        watchdog.stop()

    return fork_ranks(body, world, folder, LIMIT + 10, **more)  # type: ignore[arg-type]


def verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, list[int], str]:
    """(kind, culprits, text) as `titan5d diagnose` has it."""
    capsys.readouterr()
    assert diagnose([str(folder / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found["kind"], found["culprits"], found["text"]


def printed_once(ended: list[Ended], text: str) -> None:
    assert sum(rank.stderr.count("the run ") + rank.stderr.count(" failed in ") for rank in ended) == 1
    lines = "".join(rank.stderr for rank in ended)
    assert all(line.strip() in lines for line in text.splitlines())


def sleeps_for_ever() -> None:
    while True:
        time.sleep(0.1)


def _never_arrives(rank: int, groups: Groups) -> None:
    if rank == 2:
        sleeps_for_ever()
    dist.all_reduce(torch.ones(4, 6), group=groups["dp"])
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=groups["tp"])


def test_a_rank_that_never_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 x 2 ranks: rank 0 waits for rank 2 along dp, rank 3 along tp, and rank 1 for rank 0."""
    ended = watched(_never_arrives, tmp_path, 4)
    assert [rank.status for rank in ended] == [1, 1, 1, 1]
    kind, culprits, text = verdict(tmp_path, capsys)
    assert (kind, culprits) == ("late", [2])
    assert "the run hangs: 3 of 4 ranks wait, rank 2 did not come" in text
    assert "rank 0 waits in all_reduce #2 of dp (ranks 0, 2), float32 (4, 6)" in text
    assert "rank 3 waits in all_gather #2 of tp (ranks 2, 3), float32 (8)" in text
    assert "rank 1 waits in all_gather #2 of tp (ranks 0, 1)" in text
    assert "step 7, phase backward" in text
    assert "test_watchdog.py" in text and "sleeps_for_ever" in text and "_never_arrives" in text
    printed_once(ended, text)


def _messages(rank: int, groups: Groups) -> None:
    if rank == 0:
        dist.send(torch.ones(5), 1)
        sleeps_for_ever()
    dist.recv(torch.empty(5), 0)
    dist.recv(torch.empty(5), 0)


def test_a_message_that_nobody_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = watched(_messages, tmp_path, 2)
    assert [rank.status for rank in ended] == [1, 1]
    kind, culprits, text = verdict(tmp_path, capsys)
    assert (kind, culprits) == ("late", [0])
    assert "rank 1 waits in recv #2 from rank 0 of ranks 0,1" in text or "of tp" in text
    assert "sleeps_for_ever" in text


def _functional(rank: int, groups: Groups) -> None:
    if rank == 1:
        sleeps_for_ever()
    funcol.all_reduce(torch.ones(9), "sum", groups["tp"]).sum()


def test_a_functional_collective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorder does not see it, torch does."""
    ended = watched(_functional, tmp_path, 2)
    assert [rank.status for rank in ended] == [1, 1]
    kind, culprits, text = verdict(tmp_path, capsys)
    assert (kind, culprits) == ("late", [1])
    assert "rank 0 waits in all_reduce" in text and "of tp (ranks 0, 1), float [9]" in text.replace(
        "(9)", "[9]"
    )
    assert "sleeps_for_ever" in text


def _raises(rank: int, groups: Groups) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.all_reduce(torch.ones(4), group=groups["tp"])


def test_a_rank_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    ended = watched(_raises, tmp_path, 2)
    assert [rank.status for rank in ended] == [1, 1]
    assert time.monotonic() - started < LIMIT + 6
    kind, culprits, text = verdict(tmp_path, capsys)
    assert (kind, culprits) == ("raised", [1])
    assert "rank 1 failed in step 7, phase backward: ValueError: the reason, raised at" in text
    assert "rank 0 waits in all_reduce #2 of tp" in text
    assert "_raises" in text


def _stopped(rank: int, groups: Groups) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4), group=groups["tp"])


def test_a_stopped_process_is_named_and_ends_when_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def go_on(pids: list[int]) -> None:
        deadline = time.monotonic() + LIMIT + 8
        while not list(tmp_path.rglob("verdict.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(pids[1], signal.SIGCONT)

    ended = watched(_stopped, tmp_path, 2, meanwhile=go_on)
    assert [rank.status for rank in ended] == [1, 1]
    assert "rank 1 left no record: its process" in ended[0].stderr
    assert "is stopped (SIGSTOP or a debugger)" in ended[0].stderr
    assert "step 7, phase backward" in ended[0].stderr
    assert "rank 0 waits in all_reduce #2 of tp (ranks 0, 1)" in ended[0].stderr


def _killed(rank: int, groups: Groups) -> None:
    time.sleep(0.5)  # a sign of life
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4), group=groups["tp"])


def test_a_killed_process(tmp_path: Path) -> None:
    ended = watched(_killed, tmp_path, 2)
    assert [rank.status for rank in ended] == [1, -signal.SIGKILL]
    assert "the run cannot go on: rank 1 left no record" in ended[0].stderr
    assert "is dead: killed from outside" in ended[0].stderr


def _killed_after_a_number(rank: int, groups: Groups) -> None:
    dist.all_reduce(torch.ones(()), group=groups["tp"])
    time.sleep(0.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(()), group=groups["tp"])


def test_a_process_killed_after_a_number_was_summed(tmp_path: Path) -> None:
    ended = watched(_killed_after_a_number, tmp_path, 2)
    assert "the run cannot go on: rank 1 left no record" in ended[0].stderr
    assert "do not call the same" not in ended[0].stderr


def _arrives_too_late(rank: int, groups: Groups) -> None:
    if rank == 2:
        time.sleep(LIMIT + 2)
        os._exit(3)  # it hears of nothing; a launcher would end it
    _never_arrives(rank, groups)


def test_without_a_place_for_records_each_rank_says_where_it_waits(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    ended = watched(_arrives_too_late, tmp_path, 4)
    assert ended[0].status == 1
    lines = [line for rank in ended for line in rank.stderr.splitlines() if "ranks cannot compare" in line]
    assert any("Rank 0" in line and "in step 7, phase backward: waits in" in line for line in lines)
    assert not any("did not come" in rank.stderr or "diagnose" in rank.stderr for rank in ended)


def _holds_the_interpreter(rank: int, groups: Groups) -> None:
    if rank == 1:
        time.sleep(0.3)
        ctypes.PyDLL(None).sleep(60)  # C++ that does not give Python free
    dist.all_reduce(torch.ones(4), group=groups["tp"])


def test_a_rank_whose_interpreter_is_held_up(tmp_path: Path) -> None:
    ended = watched(_holds_the_interpreter, tmp_path, 2)
    assert [rank.status for rank in ended] == [1, 1]
    assert "rank 1 left no record: its process" in ended[0].stderr
    assert "_holds_the_interpreter" in ended[0].stderr


def _other_shape(rank: int, groups: Groups) -> None:
    dist.all_reduce(torch.ones(4 if rank == 0 else 8), group=groups["tp"])


def _other_op(rank: int, groups: Groups) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=groups["tp"])
    else:
        dist.broadcast(torch.ones(4), group=groups["tp"], group_src=0)


def _other_root(rank: int, groups: Groups) -> None:
    dist.broadcast(torch.ones(4), group=groups["tp"], group_src=1 - rank)


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        (_other_shape, "all_reduce #2, float32 (4)", "all_reduce #2, float32 (8)"),
        (_other_op, "all_reduce #2, float32 (4)", "broadcast #2 from rank 0, float32 (4)"),
        (_other_root, "broadcast #2 from rank 1", "broadcast #2 from rank 0"),
    ],
    ids=["shape", "op", "root"],
)
def test_ranks_that_call_different_things(
    case: Callable[[int, Groups], None],
    first: str,
    second: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = watched(case, tmp_path, 2)
    # gloo aborts a rank that gets more than it has room for
    assert {rank.status for rank in ended} <= {1, -signal.SIGABRT}
    kind, culprits, text = verdict(tmp_path, capsys)
    assert (kind, culprits) == ("mismatch", [0, 1])
    assert "different calls under the same number, #2 of tp" in text
    assert f"rank 0: {first}" in text and f"rank 1: {second}" in text
    assert case.__name__ in text


def _opposite_orders(rank: int, groups: Groups) -> None:
    order = [groups["tp"], dist.group.WORLD]
    for group in order if rank == 0 else reversed(order):
        dist.all_reduce(torch.ones(4), group=group)


def test_two_groups_in_opposite_orders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = watched(_opposite_orders, tmp_path, 4)
    assert [rank.status for rank in ended] == [1] * 4
    kind, culprits, text = verdict(tmp_path, capsys)
    assert kind == "order"
    assert set(culprits) <= {0, 1, 2, 3} and 0 in culprits and 1 in culprits
    assert "wait for each other" in text
    assert "rank 0 waits in all_reduce #2 of tp (ranks 0, 1)" in text
    assert "of ranks 0,1,2,3" in text


def test_a_healthy_run_says_nothing_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when one rank works for longer than the limit while no rank waits for it."""

    def case(rank: int, groups: Groups) -> None:
        for _ in range(3):
            time.sleep(0.3)
            dist.all_reduce(torch.ones(4), group=groups["tp"])
        time.sleep(LIMIT + 0.5)

    ended = watched(case, tmp_path, 2)
    assert ended == [Ended(0, ""), Ended(0, "")]
    assert not (tmp_path / "run" / "comm_traces").exists()
    assert diagnose([str(tmp_path / "run")]) == 2
    assert "no rank has left a record" in capsys.readouterr().err
    assert diagnose([str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("patience", [4.0, 60.0])
def test_a_rank_that_hangs_while_it_saves(
    patience: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others wait longer for a rank that writes, and for so long only."""

    def body(rank: int) -> None:
        group = dist.new_group(timeout=timedelta(seconds=60))
        watchdog = Watchdog(tmp_path / "run" / "comm_traces" / "1", "rank_", rank, 2, LIMIT, 1000, "cpu")
        watchdog.start()
        begun = time.monotonic()
        watchdog.watch({"files": group}, lambda: Progress(7, "checkpoint", begun, LIMIT), group, patience)
        if rank == 1 and patience == 4.0:
            sleeps_for_ever()
        if rank == 1:
            time.sleep(2 * LIMIT)  # longer than any other group may wait
        dist.barrier(group)
        watchdog.stop()

    ended = fork_ranks(body, 2, tmp_path, 20)
    if patience == 60.0:
        assert [rank.status for rank in ended] == [0, 0]
        return
    assert [rank.status for rank in ended] == [1, 1]
    kind, culprits, text = verdict(tmp_path, capsys)
    assert (kind, culprits) == ("late", [1])
    assert "sleeps_for_ever" in text
