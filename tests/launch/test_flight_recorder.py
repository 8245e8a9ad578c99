"""What the ring holds after each way into a collective, and while one hangs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from titan5d.launch.flight_recorder import FlightRecorder
from titan5d.launch.last_call import LastCall, read_last_calls
from titan5d.launch.local_ranks import run_ranks
from titan5d.launch.record import CallRecord, GroupRecord


def _calls(folder: Path) -> tuple[list[CallRecord], list[GroupRecord], CallRecord]:
    rank = dist.get_rank()
    tp = dist.new_group([0, 1])  # a mesh of all ranks would take the group of the world
    recorder = FlightRecorder(100)
    recorder.last = LastCall(folder / f"rank_{rank}.last")
    before = dict(dist.ProcessGroup.__dict__), dist.Work.__dict__["wait"]
    with recorder:
        recorder.name_axes({"tp": tp})
        dist.all_reduce(torch.ones(2, 3), group=tp)
        work = dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=tp, async_op=True)
        dist.broadcast(torch.ones(5, dtype=torch.bfloat16), 1)
        work.wait()
        other = 1 - rank
        waits = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.ones(6), other), dist.P2POp(dist.irecv, torch.empty(6), other)]
        )
        for each in waits:
            each.wait()
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8), group=tp)
        calls, groups = recorder.calls(), recorder.groups()
    assert (dict(dist.ProcessGroup.__dict__), dist.Work.__dict__["wait"]) == before
    dist.all_reduce(torch.ones(1))
    assert len(recorder.ring) == len(calls)  # after the block nothing is recorded
    return calls, groups, read_last_calls(folder, "rank_")[rank]


def test_every_call_is_in_the_ring(tmp_path: Path) -> None:
    for rank, (calls, groups, last) in enumerate(run_ranks(_calls, 2, tmp_path)):
        found = [(call.op, call.seq, call.peer, call.shapes, call.dtype, call.state) for call in calls]
        other = 1 - rank
        assert found == [
            ("all_reduce", 1, None, [[2, 3]], "float32", "done"),
            ("all_gather", 2, None, [[8]], "float32", "done"),
            ("broadcast", 1, 1, [[5]], "bfloat16", "done"),
            ("send", 1, other, [[6]], "float32", "done"),
            ("recv", 1, other, [[6]], "float32", "done"),
            ("reduce_scatter", 3, None, [[8]], "float32", "done"),
        ]
        assert all(
            "test_flight_recorder.py" in call.at[0] and call.at[0].endswith(" _calls") for call in calls
        )
        assert all(call.end is not None and 0 <= call.end - call.start < 60 for call in calls)
        world, tp = sorted(groups, key=lambda group: group.calls)
        assert (tp.axis, tp.ranks, tp.calls, tp.messages) == ("tp", (0, 1), 3, [])
        assert (world.calls, sorted(world.messages)) == (1, [("recv", other, 1), ("send", other, 1)])
        assert (last.op, last.seq, last.shapes, last.dtype) == ("reduce_scatter", 3, [[8]], "float32")
        assert last.group == tp.name


def test_the_last_call_of_a_number_is_not_that_of_no_tensor(tmp_path: Path) -> None:
    for rank, text in enumerate(["-", "", "4,8 - 16"]):
        LastCall(tmp_path / f"rank_{rank}.last").write("g", 5, "all_reduce", None, text, "float32", 1.0)
    shapes = [call.shapes for _, call in sorted(read_last_calls(tmp_path, "rank_").items())]
    assert shapes == [[[]], [], [[4, 8], [], [16]]]


def _number(folder: Path) -> tuple[CallRecord, CallRecord]:
    recorder = FlightRecorder(10)
    recorder.last = LastCall(folder / f"rank_{dist.get_rank()}.last")
    with recorder:
        dist.all_reduce(torch.ones(()))
        call = recorder.calls()[-1]
    return call, read_last_calls(folder, "rank_")[dist.get_rank()]


def test_both_records_of_a_number_agree(tmp_path: Path) -> None:
    for call, last in run_ranks(_number, 2, tmp_path):
        assert call.shapes == last.shapes == [[]]


def _waiting() -> tuple[str, float, str]:
    """Rank 1 comes half a second late; what rank 0's other thread sees meanwhile."""
    recorder, seen = FlightRecorder(10), []
    with recorder:
        if dist.get_rank() == 1:
            time.sleep(0.5)
            dist.all_reduce(torch.ones(3))
            return "", 0.0, ""

        def look() -> None:
            time.sleep(0.2)
            ((call, since),) = recorder.waits.values()
            seen.append((recorder.record(call).state, time.monotonic() - since))

        thread = threading.Thread(target=look)
        thread.start()
        dist.all_reduce(torch.ones(3))
        thread.join()
        assert not recorder.waits
        return (*seen[0], recorder.calls()[0].state)


def test_a_wait_is_seen_from_another_thread() -> None:
    state, seconds, after = run_ranks(_waiting, 2)[0]
    assert (state, after) == ("waits", "done")
    assert 0.05 < seconds < 0.5


def test_the_ring_keeps_the_newest(tmp_path: Path) -> None:
    def body() -> list[int]:
        with FlightRecorder(3) as recorder:
            for _ in range(5):
                dist.all_reduce(torch.ones(1))
            return [call.seq for call in recorder.calls()]

    assert run_ranks(body, 1) == [[3, 4, 5]]
