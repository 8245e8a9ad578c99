"""Who failed first: from what ranks leave in the status folder to one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titan5d.launch import exit_status, failure
from titan5d.launch.failure import Failure, first_failure

GLOO = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:43153. This is typically caused by"
NODE = "node 0 of 2 (a)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(exit_status.FOLDER, str(tmp_path))
    return tmp_path


def rank(
    pid: int, number: int, error: BaseException | None, at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plays a rank that begins and, unless it is killed, notes its error and records its status."""
    monkeypatch.setattr(os, "getpid", lambda: pid)
    monkeypatch.setattr(failure.time, "time", lambda: at)
    environ = {**os.environ, "RANK": str(number), "LOCAL_RANK": str(number % 2)}
    failure.begin(environ)
    if error is not None:
        failure.note(error, environ)
        exit_status.record(exit_status.FAILED)


def test_the_first_error_of_its_own_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank(100, 2, RuntimeError(GLOO), 10.0, monkeypatch)
    rank(101, 3, ValueError("loss is nan"), 12.5, monkeypatch)
    sentence = first_failure(folder, NODE, [100, 101])
    assert sentence is not None and sentence.startswith(f"{NODE}: first to fail was rank 3 at ")
    assert sentence.endswith(".500: ValueError: loss is nan")


def test_a_rank_that_died_without_a_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank(100, 2, RuntimeError(GLOO), 10.0, monkeypatch)
    rank(101, 3, None, 9.0, monkeypatch)
    sentence = first_failure(folder, NODE, [100, 101])
    assert sentence is not None and "rank 3 died without a word" in sentence


def test_ranks_that_only_lost_a_peer_point_to_its_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank(100, 0, RuntimeError(GLOO), 10.0, monkeypatch)
    rank(
        101, 1, RuntimeError(GLOO.replace("10.0.0.2", "127.0.0.1")), 10.0, monkeypatch
    )  # its neighbour had gone
    sentence = first_failure(folder, NODE, [101, 100])
    assert sentence is not None and "no rank failed here by itself" in sentence
    assert "the log of 10.0.0.2 says why" in sentence
    assert "127.0.0.1" not in sentence.split("why.")[0]
    assert "RuntimeError: Connection closed by peer" in sentence, "without the place in gloo's source"


def test_on_one_node_there_is_no_other_log_to_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank(100, 0, RuntimeError(GLOO), 10.0, monkeypatch)
    sentence = first_failure(folder, failure.ALONE, [100])
    assert sentence is not None and "the ranks only lost each other" in sentence
    assert "other nodes" not in sentence


def test_a_full_disk_does_not_take_the_place_of_the_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    failure.note(ValueError("the true one"), {**os.environ, "RANK": "0"})


def test_a_start_that_is_over_does_not_count_for_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank(100, 0, ValueError("once"), 10.0, monkeypatch)
    assert exit_status.recorded(folder) == [exit_status.FAILED]
    rank(200, 0, None, 20.0, monkeypatch)
    assert exit_status.recorded(folder) == []
    exit_status.record(exit_status.DONE)
    assert exit_status.combine(folder, 1, 0) == exit_status.DONE
    assert first_failure(folder, NODE, [200]) is None
    assert "once" in str(first_failure(folder, NODE, [100]))


def test_nothing_is_written_without_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(exit_status.FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    failure.begin()
    failure.note(ValueError())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GLOO, True),
        ("Timed out waiting 8000ms for recv operation to complete", True),
        ("Read error [10.77.0.2]:29881: Connection reset by peer", True),
        ("Socket Timeout", True),
        ("NCCL error: remote process exited or there was a network error", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("Expected all tensors to be on the same device", False),
        ("injected failure", False),
    ],
)
def test_which_errors_say_that_the_other_side_is_gone(error: str, lost: bool) -> None:
    assert Failure(0, 0.0, error).lost_peer == lost
