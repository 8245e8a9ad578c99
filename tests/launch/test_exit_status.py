"""Ranks' statuses, as each writes its own, combined into the one of the script."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from titan5d.launch import exit_status
from titan5d.launch.exit_status import DONE, FAILED, REFUSED, STOPPED, combine, record, recorded


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(exit_status.FOLDER, str(tmp_path))
    return tmp_path


def write(folder: Path, *statuses: int) -> None:
    for rank, status in enumerate(statuses):
        (folder / str(rank)).write_text(str(status))


@pytest.mark.parametrize(
    ("statuses", "launcher", "expected"),
    [
        ((DONE, DONE), 0, DONE),
        ((STOPPED, STOPPED), 0, STOPPED),
        ((STOPPED, STOPPED), 1, STOPPED),  # the launcher got the signal as well
        ((REFUSED, REFUSED), 0, REFUSED),
        ((REFUSED,), 1, REFUSED),  # one refused, the launcher ended the other
        ((REFUSED, FAILED), 1, REFUSED),  # the other one lost its peer
        ((FAILED, STOPPED), 1, FAILED),  # a crash is no clean stop
        ((STOPPED,), 1, FAILED),  # the other died without a word: nothing says that it saved
        ((DONE, STOPPED), 0, FAILED),
        ((DONE,), 1, FAILED),
        ((), 1, FAILED),
        ((), -9, FAILED),
        ((), 0, DONE),
    ],
)
def test_combine(statuses: tuple[int, ...], launcher: int, expected: int, tmp_path: Path):
    write(tmp_path, *statuses)
    assert combine(tmp_path, 2, launcher) == expected


def test_without_the_script_a_rank_leaves_with_its_own_status(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(exit_status.FOLDER, raising=False)
    assert [record(status) for status in (DONE, FAILED, REFUSED, STOPPED)] == [DONE, FAILED, REFUSED, STOPPED]


def test_a_rank_writes_its_status_and_leaves_torchrun_in_peace(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for rank, (status, leaves_with) in enumerate([(DONE, DONE), (FAILED, FAILED), (STOPPED, DONE)]):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert record(status) == leaves_with
    assert sorted(recorded(folder)) == [DONE, FAILED, STOPPED]
    assert sorted(os.listdir(folder)) == ["0", "1", "2"]


def test_ranks_refused_together_leave_in_peace(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    later = threading.Timer(0.2, lambda: (folder / "1").write_text(str(REFUSED)))
    later.start()
    assert record(REFUSED) == DONE
    later.join()


def test_a_rank_refused_alone_leaves_with_2_so_that_torchrun_ends_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(exit_status, "PATIENCE", 0.2)
    assert record(REFUSED) == REFUSED
    assert recorded(folder) == [REFUSED]


def test_half_written_files_do_not_count(folder: Path):
    write(folder, DONE)
    (folder / "1.part").write_text("")
    assert recorded(folder) == [DONE]
