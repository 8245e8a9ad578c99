"""Verdicts from records made by hand: large worlds, lost ranks, circles, messages, and what must not be blamed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from titan5d.data.prefetch import read_ahead
from titan5d.launch.heartbeat import Heartbeat
from titan5d.launch.mismatch import find_mismatches
from titan5d.launch.record import CallRecord, GroupRecord, RankRecord, read_records, write_record
from titan5d.launch.stacks import all_stacks, read_frozen
from titan5d.launch.torch_trace import parse
from titan5d.launch.traces import Traces
from titan5d.launch.verdict import judge
from titan5d.launch.wording import rank_list

NOW = time.time()


def record(
    rank: int,
    calls: list[CallRecord],
    groups: list[GroupRecord],
    world: int = 4,
    error: str = "",
    at: float = NOW,
) -> RankRecord:
    return RankRecord(
        rank,
        world,
        "host",
        100 + rank,
        at,
        "raised" if error else "asked",
        step=5,
        phase="forward",
        phase_seconds=3.0,
        limit=2.0,
        error=error,
        error_at="/x/model.py:7 forward" if error else "",
        stacks={"MainThread": [f"/x/place.py:{rank} here"]},
        groups=groups,
        calls=calls,
    )


def waits(seq: int, group: str = "g", op: str = "all_reduce", peer: int | None = None) -> CallRecord:
    return CallRecord(group, seq, op, peer, [[4]], "float32", start=NOW - 3, state="waits")


def done(
    seq: int, group: str = "g", op: str = "all_reduce", peer: int | None = None, n: int = 4
) -> CallRecord:
    return CallRecord(group, seq, op, peer, [[n]], "float32", start=NOW - 9 + seq)


def beat(rank: int) -> Heartbeat:
    return Heartbeat(rank, "elsewhere", 1, NOW - 6, 5, "backward", False)


def test_a_thousand_ranks_fit_on_a_screen() -> None:
    ranks = tuple(range(1024))
    records = {rank: record(rank, [waits(8)], [GroupRecord("g", "loss", ranks, 8)], 1024) for rank in ranks}
    for late in (3, 700):
        records[late] = record(late, [done(7)], [GroupRecord("g", "loss", ranks, 7)], 1024)
    found = judge(records, Traces(), 1024)
    assert (found.kind, found.culprits) == ("late", [3, 700])
    lines = found.text.splitlines()
    assert lines[0] == "the run hangs: 1022 of 1024 ranks wait, ranks 3, 700 did not come"
    assert lines[1].startswith(
        "ranks 0-2, 4-699, 701-1023 wait in all_reduce #8 of loss (ranks 0-1023), float32 (4), for 3.0 s;"
    )
    assert "/x/place.py:700 here" in found.text and len(lines) < 20
    assert rank_list(range(0, 64, 8)) == "ranks 0, 8, .., 56"
    assert rank_list([5]) == "rank 5" and rank_list([1, 2, 7]) == "ranks 1, 2, 7"


def test_waiting_for_one_that_waits_is_followed_to_its_end() -> None:
    a, b = GroupRecord("a", "tp", (0, 1), 4), GroupRecord("b", "pp", (1, 2), 6)
    records = {
        0: record(0, [waits(4, "a")], [a]),
        1: record(1, [waits(6, "b")], [replace(a, calls=3), b]),
        2: record(2, [done(5, "b")], [replace(b, calls=5)]),
    }
    found = judge(records, Traces(), 3)
    assert (found.kind, found.culprits) == ("late", [2])
    assert "rank 1 (host, process 101) is in step 5, phase forward for 3.0 s; it waits itself" in found.text
    assert "its last collective of pp: #5; all_reduce #6 is due" in found.text


def test_messages_are_matched_by_pair_and_direction() -> None:
    def group(**messages: int) -> GroupRecord:
        return GroupRecord("p", "pp", (0, 1, 2), 0, [(op[:4], int(op[4:]), n) for op, n in messages.items()])

    records = {
        0: record(0, [], [group(send1=3)]),
        1: record(1, [waits(4, "p", "recv", peer=0)], [group(recv0=4, send2=9)]),
        2: record(2, [waits(10, "p", "recv", peer=1)], [group(recv1=10)]),
    }
    found = judge(records, Traces(), 3)
    assert (found.kind, found.culprits) == ("late", [0])
    assert "rank 1 waits in recv #4 from rank 0 of pp" in found.text
    assert "rank 2 waits in recv #10 from rank 1 of pp" in found.text


def test_the_end_of_a_message_that_is_too_short_is_named() -> None:
    groups = [GroupRecord("p", "pp", (0, 1))]
    records = {
        0: record(0, [done(1, "p", "send", peer=1, n=4), waits(1, "p")], groups),
        1: record(1, [done(1, "p", "recv", peer=0, n=8)], groups),
    }
    (found,) = find_mismatches(records)
    assert "rank 0: send #1 to rank 1, float32 (4)" in str(found)
    assert "rank 1: recv #1 from rank 0, float32 (8)" in str(found)


def test_the_odd_one_out_is_the_culprit_and_uneven_all_to_alls_are_none() -> None:
    groups = [GroupRecord("g", "ep", (0, 1, 2), 2)]
    made = {rank: [done(1, op="all_to_all", n=rank + 1), done(2)] for rank in range(3)}
    assert find_mismatches({rank: record(rank, calls, groups) for rank, calls in made.items()}) == []
    made[1][1] = done(2, n=5)
    found = judge({rank: record(rank, calls, groups) for rank, calls in made.items()}, Traces(), 3)
    assert (found.kind, found.culprits) == ("mismatch", [1])
    assert "different calls under the same number, #2 of ep" in found.text


def test_the_first_error_of_its_own_is_the_cause_not_a_lost_connection() -> None:
    groups = [GroupRecord("g", "tp", (0, 1), 3)]
    records = {
        0: record(
            0, [], groups, error="RuntimeError: Connection closed by peer [10.0.0.2]:43210", at=NOW - 2
        ),
        1: record(1, [], groups, error="OutOfMemoryError: CUDA out of memory", at=NOW - 1),
    }
    found = judge(records, Traces(), 2)
    assert (found.kind, found.culprits) == ("raised", [1])
    assert found.text.startswith(
        "rank 1 failed in step 5, phase forward: OutOfMemoryError: CUDA out of memory, raised at /x/model.py:7 forward"
    )
    assert "rank 0 failed after that, at /x/model.py:7 forward: RuntimeError: Connection closed" in found.text
    # the same error everywhere is one failure of all
    same = {rank: record(rank, [], groups, error="ValueError: x") for rank in range(2)}
    assert judge(same, Traces(), 2).culprits == [0, 1]


def test_a_rank_that_others_gave_up_on_is_blamed_not_those_that_gave_up() -> None:
    """As when a group is made: a call of the store, no collective, and one rank never comes to it."""
    groups = [GroupRecord("g", "dp_shard", (0, 1, 2, 3), 3)]
    gave_up = "DistStoreError: wait timeout after 21000ms, keys: /default_pg/0//29"
    records = {rank: record(rank, [done(3)], groups, error=gave_up) for rank in (0, 2, 3)}
    records[1] = record(1, [done(3)], groups)
    found = judge(records, Traces(), 4)
    assert (found.kind, found.culprits) == ("late", [1])
    lines = found.text.splitlines()
    assert lines[0] == "the run cannot go on: rank 1 did not come: ranks 0, 2, 3 failed without it"
    assert f"rank 0 failed after that, at /x/model.py:7 forward: {gave_up}" in lines
    assert lines[-1] == "        /x/place.py:1 here"
    # neither is one to blame for which another waits in a collective
    records[2] = record(2, [waits(4)], [replace(groups[0], calls=4)])
    found = judge(records, Traces(), 4)
    assert (found.kind, found.culprits) == ("late", [1])
    assert found.text.startswith(
        "the run cannot go on: rank 1 did not come: ranks 0, 3 failed without it; 1 of 4"
    )
    # nor is one that has nothing to do with it, where a machine is gone that shares no folder
    closed = "RuntimeError: Connection closed by peer [10.0.0.2]:43210"
    records = {0: record(0, [], groups, error=closed), 1: record(1, [], groups)}
    assert judge(records, Traces(), 4).kind == "lost"
    # an error of its own comes first
    records = {0: record(0, [], groups, error="ValueError: x"), 1: record(1, [], groups)}
    assert judge(records, Traces(), 2).culprits == [0]


def test_many_ranks_that_gave_up_fit_on_a_screen() -> None:
    groups = [GroupRecord("g", "loss", tuple(range(512)), 3)]
    records = {rank: record(rank, [], groups, 512, error="RuntimeError: Timed out") for rank in range(511)}
    records[511] = record(511, [], groups, 512)
    found = judge(records, Traces(), 512)
    assert found.culprits == [511] and len(found.text.splitlines()) < 15
    assert "... and 503 ranks more failed after that" in found.text


def test_of_a_rank_that_waits_for_data_the_thread_that_reads_it_is_shown() -> None:
    group = GroupRecord("g", "dp_shard", (0, 1), 8)
    go_on = threading.Event()

    def stuck_disk() -> Iterator[int]:
        go_on.wait()
        yield 1

    def takes_a_batch() -> None:
        for _ in read_ahead(stuck_disk(), 1, 60.0):
            return

    taker = threading.Thread(target=takes_a_batch, name="takes a batch")
    taker.start()
    try:
        stacks = all_stacks()
        while "stuck_disk" not in str(stacks) or "queue.py" not in str(stacks["takes a batch"][:2]):
            stacks = all_stacks()
    finally:
        go_on.set()
        taker.join()
    stacks["MainThread"] = stacks.pop("takes a batch")
    late = replace(record(1, [done(7)], [replace(group, calls=7)]), stacks=stacks)
    found = judge({0: record(0, [waits(8)], [group]), 1: late}, Traces(), 2)
    _, _, stands = found.text.partition("    its Python stands at\n")
    reads, _, asks = stands.partition(
        "    in the thread that reads data ahead; the main thread waits for it at\n"
    )
    assert reads.strip().endswith(" stuck_disk") and "prefetch.py" not in found.text
    assert asks.strip().splitlines()[0].endswith(" takes_a_batch") and len(asks.splitlines()) <= 2
    # between two batches the thread that reads ahead is none of the user's business
    elsewhere = replace(late, stacks={**stacks, "MainThread": ["/x/place.py:1 here"]})
    found = judge({0: record(0, [waits(8)], [group]), 1: elsewhere}, Traces(), 2)
    assert "/x/place.py:1 here" in found.text and "stuck_disk" not in found.text


def test_a_rank_without_a_record_is_described_by_its_traces() -> None:
    group = GroupRecord("g", "dp_shard", (0, 1), 8)
    records = {0: record(0, [waits(8)], [group])}
    traces = Traces({1: beat(1)}, {1: done(7)}, {1: ["/x/native.py:3 hold"]})
    found = judge(records, traces, 2)
    assert (found.kind, found.culprits) == ("lost", [1])
    assert "rank 1 left no record: its host elsewhere or its process there is gone" in found.text
    assert "6.0 s before the others' records: step 5, phase backward" in found.text
    assert "its last collective: all_reduce #7 of dp_shard, float32 (4)" in found.text
    assert "/x/native.py:3 hold" in found.text
    # a rank that was aborted in the very call the other waits in, which was larger
    found = judge(records, Traces({1: beat(1)}, {1: done(8, n=9)}), 2)
    assert (found.kind, found.culprits) == ("mismatch", [0, 1])
    assert found.waits[0].absent == []


def test_ranks_that_never_showed_in_this_folder_do_not_hide_the_late_one() -> None:
    """Two machines without a shared folder: each sees its own ranks."""
    group = GroupRecord("g", "dp_shard", (0, 1, 2, 3), 8)
    records = {0: record(0, [waits(8)], [group]), 1: record(1, [done(7)], [replace(group, calls=7)])}
    found = judge(records, Traces({0: beat(0), 1: beat(1)}), 4)
    assert (found.kind, found.culprits) == ("late", [1])
    assert "rank 2 left no record and no sign of life in this folder" in found.text
    with pytest.raises(ValueError):
        judge({}, Traces(), 4)


def test_all_have_called_it_the_network_is_left() -> None:
    group = GroupRecord("g", "dp_shard", (0, 1), 8)
    found = judge({rank: record(rank, [waits(8)], [group]) for rank in range(2)}, Traces(), 2)
    assert found.kind == "unclear" and "look at the network" in found.text


def test_records_survive_the_disk(tmp_path: Path) -> None:
    group = GroupRecord("g", "pp", (0, 1), 8, [("send", 1, 3)])
    one = record(0, [waits(8)], [group])
    write_record(tmp_path, "rank_", one, one.calls)
    assert read_records(tmp_path, "rank_") == {0: one}


def test_records_are_on_the_disk_before_they_get_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that dies right after leaves no empty record; signs of life, every second, are not worth the wait."""
    synced: list[list[str]] = []
    fsync = os.fsync

    def noted(number: int) -> None:
        fsync(number)
        synced.append(sorted(file.name for file in tmp_path.glob("*.json*") if file.suffix != ".part"))

    monkeypatch.setattr(os, "fsync", noted)
    write_record(tmp_path, "rank_", record(0, [], []))
    assert synced == [[], ["rank_0.calls.jsonl"]]
    beat(0).write(tmp_path, "rank_")
    assert len(synced) == 2


def test_a_call_of_a_group_that_came_up_while_the_record_was_made(tmp_path: Path) -> None:
    group = GroupRecord("g", "pp", (0, 1), 8)
    write_record(tmp_path, "rank_", record(0, [waits(8), waits(1, "new")], [group], 2))
    write_record(tmp_path, "rank_", record(1, [done(7)], [replace(group, calls=7)], 2))
    assert judge(read_records(tmp_path, "rank_"), Traces(), 2).culprits == [1]


def test_stacks_that_faulthandler_wrote(tmp_path: Path) -> None:
    (tmp_path / "rank_3.frozen").write_text(
        "Timeout (0:00:02)!\nThread 0x00007f (most recent call first):\n"
        '  File "/x/watchdog.py", line 9 in _run\n\nThread 0x00007e (most recent call first):\n'
        '  File "/x/native.py", line 3 in hold\n  File "/x/main.py", line 8 in <module>\n'
    )
    (tmp_path / "rank_2.frozen").write_text("")
    assert read_frozen(tmp_path, "rank_") == {3: ["/x/native.py:3 hold", "/x/main.py:8 <module>"]}


def test_torchs_own_record_with_frames_as_nccl_has_them() -> None:
    entry = {
        "pg_id": 2,
        "process_group": ["7", "tp"],
        "collective_seq_id": 9,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[3, 4]],
        "input_dtypes": ["BFloat16"],
        "time_created_ns": 5_000_000_000,
        "frames": [{"filename": "/x/a.py", "line": 4, "name": "f"}],
    }
    status = {
        "last_enqueued_collective": "9",
        "last_completed_collective": "8",
        "last_started_collective": "9",
    }
    (group,) = parse({"entries": [entry], "pg_status": {"2": status, "5": status}})
    assert (group.name, group.enqueued, group.completed, group.under_way) == ("7", 9, 8, True)
    assert group.calls[0] == CallRecord(
        "torch:7", 9, "all_reduce", None, [[3, 4]], "bfloat16", 5.0, at=["/x/a.py:4 f"]
    )
