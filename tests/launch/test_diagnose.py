"""titan5d diagnose on folders as they are found: damaged files, and records that came after the verdict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_verdict import NOW, beat, done, record, waits
from titan5d.launch.diagnose import main
from titan5d.launch.record import GroupRecord, RankRecord, read_records, write_record
from titan5d.launch.traces import Traces
from titan5d.launch.verdict import VERDICT, judge, read_verdict, write_verdict

GROUP = GroupRecord("g", "dp_shard", (0, 1, 2, 3), 8)
LATE = "rank 3 did not come"


def rank_waits(rank: int) -> RankRecord:
    return record(rank, [waits(8)], [GROUP])


def rank_is_late(rank: int, at: float = NOW) -> RankRecord:
    return record(rank, [done(7)], [replace(GROUP, calls=7)], at=at)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """The folder of a start in which ranks 0-2 wait for rank 3, without a verdict, as a killed run leaves it."""
    folder = tmp_path / "run" / "comm_traces" / "1"
    folder.mkdir(parents=True)
    for one in (*map(rank_waits, range(3)), rank_is_late(3)):
        write_record(folder, "rank_", one, one.calls)
        beat(one.rank).write(folder, "rank_")
    return folder


def diagnosed(start: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What programs get; people get the same."""
    run_folder = str(start.parent.parent)
    capsys.readouterr()
    assert main([run_folder]) == 0
    text = capsys.readouterr().out
    assert main([run_folder, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    end = [f"records: {start}", *(f"left out: {sentence}" for sentence in found["left_out"])]
    assert text == "\n".join([found["text"], *found["later"], *end]) + "\n"
    return found


def changed(**values: object) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def _without_step(file: Path) -> None:
    values = json.loads(file.read_text())
    del values["step"]
    file.write_text(json.dumps(values))


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE = {
    "empty": lambda file: file.write_text(""),
    "truncated": lambda file: file.write_text(file.read_text()[:300]),
    "a list": lambda file: file.write_text("[]"),
    "of calls that are none": changed(calls=[3]),
    "more keys": changed(new=1),
    "fewer keys": _without_step,
    "another type": changed(at="noon"),
    "of another rank": changed(rank=2),
    "not text": lambda file: file.write_bytes(b"\xff\xfe"),
    "a folder": _folder,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_record_is_left_out_and_named(
    damage: Callable[[Path], object], start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(start / "rank_1.json")
    found = diagnosed(start, capsys)
    assert found["kind"] == "late" and LATE in found["text"]
    assert found["records"] == [0, 2, 3]
    (sentence,) = found["left_out"]
    assert sentence.startswith("rank_1.json cannot be read (") and "\n" not in sentence
    assert sorted(read_records(start, "rank_")) == [0, 2, 3]  # as the watchdog reads them


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"kind": 1', '{"kind": 1, "culprits": 2, "text": 3, "records": 4}']
)
def test_a_damaged_verdict_is_left_out(text: str, start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (start / VERDICT).write_text(text)
    found = diagnosed(start, capsys)
    assert LATE in found["text"]
    assert [sentence[:27] for sentence in found["left_out"]] == ["verdict.json cannot be read"]


def test_what_can_be_read_of_a_ring_is_read(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = start / "rank_1.calls.jsonl"
    ring.write_text(ring.read_text() + json.dumps({"group": "g"})[:7])
    found = diagnosed(start, capsys)
    assert LATE in found["text"] and found["records"] == [0, 1, 2, 3]
    (sentence,) = found["left_out"]
    assert sentence.startswith("rank_1.calls.jsonl cannot be read from line 2 on (")


@pytest.mark.parametrize("config", [b"\xff\xfe[comm]\n", b"comm = 3\n", b"[comm]\nsave_traces_folder = 3\n"])
def test_a_damaged_config(config: bytes, start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (start.parent.parent / "config.toml").write_bytes(config)
    found = diagnosed(start, capsys)
    assert LATE in found["text"]
    assert [sentence[:26] for sentence in found["left_out"]] == ["config.toml cannot be read"]
    assert main([str(start)]) == 0


def test_a_rank_whose_record_is_damaged_is_blamed_last(
    start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1, 3):
        (start / f"rank_{rank}.json").write_text("")
    found = diagnosed(start, capsys)
    assert (found["kind"], found["culprits"]) == ("lost", [0, 1, 3])
    assert "ranks 0, 1, 3 left records that cannot be read; 1 of 4 ranks wait" in found["text"]
    assert "rank 0 left a record that cannot be read: its host elsewhere" in found["text"]
    (start / "rank_3.json").unlink()
    assert diagnosed(start, capsys)["culprits"] == [3]


def test_nothing_usable_is_one_line_and_a_status(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        (start / f"rank_{rank}.json").write_text("")
    (start / VERDICT).write_text("{}")
    assert main([str(start.parent.parent)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "rank_3.json cannot be read" in said.err and "verdict.json cannot be read" in said.err


def test_a_verdict_is_said_again_without_the_records(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = judge(read_records(start, "rank_"), Traces(), 4)
    write_verdict(start, verdict)
    for rank in range(4):
        (start / f"rank_{rank}.json").unlink()
    assert diagnosed(start, capsys)["text"] == verdict.text


def test_a_record_that_came_after_the_verdict_does_not_change_it(
    start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 3 was stopped, and goes on after the verdict: by then it has called what the others waited for."""
    (start / "rank_3.json").unlink()
    verdict = judge(read_records(start, "rank_"), Traces(), 4)
    assert (verdict.kind, verdict.culprits) == ("lost", [3])
    write_verdict(start, verdict)
    woken = replace(rank_waits(3), at=read_verdict(start).at + 12)
    write_record(start, "rank_", woken)
    found = diagnosed(start, capsys)
    assert (found["kind"], found["culprits"], found["text"]) == ("lost", [3], verdict.text)
    (note,) = found["later"]
    assert note.startswith("rank 3 left its record 12.0 s later, in step 5, phase forward\n")
    assert "/x/place.py:3 here" in note
    # should it judge itself, the first verdict stays
    write_verdict(start, judge(read_records(start, "rank_"), Traces(), 4))
    assert read_verdict(start).text == verdict.text


def test_records_of_machines_that_share_no_folder_are_judged_together(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict that was copied along is that of one machine, which did not see what was there at that time."""
    own = tmp_path / "own"
    own.mkdir()
    for rank in (0, 1):
        shutil.copy(start / f"rank_{rank}.json", own)
    write_verdict(own, judge(read_records(own, "rank_"), Traces(), 4))
    shutil.copy(own / VERDICT, start)
    assert read_verdict(start).culprits == [2, 3]
    found = diagnosed(start, capsys)
    assert (found["kind"], found["culprits"], found["later"]) == ("late", [3], [])


def test_a_verdict_of_an_earlier_version_counts_from_the_time_of_its_file(
    start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (start / "rank_3.json").unlink()
    write_verdict(start, judge(read_records(start, "rank_"), Traces(), 4))
    values = json.loads((start / VERDICT).read_text())
    del values["at"]
    (start / VERDICT).write_text(json.dumps(values))
    late = rank_is_late(3, at=(start / VERDICT).stat().st_mtime + 3)
    write_record(start, "rank_", late)
    found = diagnosed(start, capsys)
    assert found["kind"] == "lost" and "rank 3 left its record 3.0 s later" in found["later"][0]
    write_record(start, "rank_", replace(late, at=NOW - 5))
    found = diagnosed(start, capsys)
    assert found["kind"] == "late" and found["later"] == []
