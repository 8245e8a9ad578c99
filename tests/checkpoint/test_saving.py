"""Runs that save: what is kept, what happens when a save fails or a checkpoint is damaged, from where a run starts."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import assert_same_tensors, metrics, run, tensors, words
from titan5d.checkpoint import async_save, save
from titan5d.checkpoint.folder import Lock, complete_steps
from titan5d.launch.local_ranks import run_ranks
from titan5d.launch.run import train

SMALL: dict[str, Any] = {
    "model__n_layers": 2,
    "model__dim": 32,
    "training__seq_len": 32,
    "checkpoint__interval": 1,
}
ASYNC = {"checkpoint__async_mode": "async"}


def folder_of(folder: Path, name: str) -> Path:
    return folder / name / "checkpoint"


def slow_writer(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every write of a thread begins only after this time."""
    write = async_save.write_share

    def slow(*args: Any) -> save.Written:
        time.sleep(seconds)
        return write(*args)

    monkeypatch.setattr(async_save, "write_share", slow)


@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.slow)])
def test_the_newest_complete_checkpoints_are_kept(tmp_path: Path, mode: str) -> None:
    """Case 053: k counts complete ones only; foreign names stay."""
    folder = folder_of(tmp_path, "a")
    for name in ("step-3.tmp", "best", "step-abc", "step-99"):
        (folder / name).mkdir(parents=True)
    flags = {**SMALL, "checkpoint__keep_latest_k": 2, "training__steps": 8, "checkpoint__async_mode": mode}
    assert run(tmp_path, "a", 2, **flags) == [0, 0]
    names = {path.name for path in folder.iterdir()}
    assert names == {"step-3.tmp", "best", "step-abc", "step-99", "step-7", "step-8", ".lock"}
    assert run(tmp_path, "a", 2, **{**flags, "training__steps": 9}) == [0, 0]
    assert complete_steps(folder) == [9, 8] and sorted(metrics(tmp_path, "a")) == list(range(1, 10))


def test_an_async_checkpoint_holds_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 055: with a slow writer and large steps, every save of an async run is that of a run that waits."""
    flags = {**SMALL, "optimizer__name": "SGD", "optimizer__lr": 1.0, "training__steps": 5}
    assert run(tmp_path, "waits", 2, **flags) == [0, 0]
    slow_writer(monkeypatch, 0.4)
    assert run(tmp_path, "async", 2, **flags, **ASYNC) == [0, 0]
    assert complete_steps(folder_of(tmp_path, "async")) == [5, 4, 3, 2, 1]
    for step in range(1, 6):
        assert_same_tensors(tensors(tmp_path, "waits", step), tensors(tmp_path, "async", step))
    first, last = (tensors(tmp_path, "async", step)["model.norm.weight"] for step in (1, 5))
    assert not torch.equal(first, last)


@pytest.mark.slow
def test_without_a_copy_an_async_checkpoint_would_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    live = lambda self, blocks: {name: block.local for name, block in blocks.items()}  # noqa: E731
    monkeypatch.setattr(async_save.Staging, "copy", live)
    slow_writer(monkeypatch, 0.4)
    flags = {
        **SMALL,
        "optimizer__name": "SGD",
        "optimizer__lr": 1.0,
        "training__steps": 3,
        "checkpoint__interval": 2,
    }
    assert run(tmp_path, "waits", **flags) == [0]
    assert run(tmp_path, "async", **flags, **ASYNC) == [0]
    one, two = (tensors(tmp_path, name, 2)["model.norm.weight"] for name in ("waits", "async"))
    assert not torch.equal(one, two)


def test_a_damaged_checkpoint_is_never_chosen_silently(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = {**SMALL, "training__steps": 3}
    assert run(tmp_path, "a", 2, **flags) == [0, 0]
    folder = folder_of(tmp_path, "a")
    flipped, cut = folder / "step-3" / "rank-00001.safetensors", folder / "step-2" / "rank-00000.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-5] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-100])
    capfd.readouterr()
    assert run(tmp_path, "a", 2, **flags, checkpoint__load_step=3) == [2, 2]
    said = capfd.readouterr().err
    assert "load_step = 3" in said and str(flipped) in said and "1, 2, 3" in said
    assert run(tmp_path, "a", 2, **flags) == [0, 0]
    said = capfd.readouterr().err
    assert said.count("passed over") == 2 and str(flipped) in said and str(cut) in said
    assert "continuing after step 1" in said
    # what was damaged has been trained and saved anew
    assert run(tmp_path, "a", 2, **flags, checkpoint__load_step=3) == [0, 0]


def test_where_a_run_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Case 056."""
    flags = {**SMALL, "checkpoint__interval": 2, "training__steps": 4}
    (folder_of(tmp_path, "a") / "junk").mkdir(parents=True)
    assert run(tmp_path, "a", **flags) == [0]
    assert "drawn anew from training.seed; no complete checkpoint in" in capfd.readouterr().err
    folder = folder_of(tmp_path, "a")
    assert run(tmp_path, "a", **flags, checkpoint__load_step=7) == [2]
    said = capfd.readouterr().err
    assert said.count("refused:") == 1 and "load_step = 7" in said and "2, 4" in said
    # finished: no step, nothing written
    before = {path: path.stat().st_mtime_ns for path in folder.glob("step-*/*")}
    assert run(tmp_path, "a", **flags) == [0]
    assert {path: path.stat().st_mtime_ns for path in folder.glob("step-*/*")} == before
    assert "continuing after step 4" in capfd.readouterr().err
    # given weights lose to what the run has, and this is said
    given = {"checkpoint__initial_load_path": folder / "step-2"}
    assert run(tmp_path, "a", **flags, **given) == [0]
    said = capfd.readouterr().err
    assert "step-2 is not used" in said and "continuing after step 4" in said
    # and are taken by a run that has none: the weights alone, or everything
    assert run(tmp_path, "b", **{**flags, "training__steps": 2, "optimizer__lr": 0}, **given) == [0]
    assert "(step 2), the weights alone" in capfd.readouterr().err
    for key, tensor in tensors(tmp_path, "a", 2).items():
        if key.startswith("model."):
            assert torch.equal(tensors(tmp_path, "b", 2)[key], tensor), key
    whole = {**given, "checkpoint__initial_load_model_only": "false"}
    assert run(tmp_path, "c", **flags, **whole) == [0]
    assert_same_tensors(tensors(tmp_path, "c", 4), tensors(tmp_path, "a", 4))
    # a folder of checkpoints is not one
    assert run(tmp_path, "d", **flags, checkpoint__initial_load_path=folder) == [2]
    assert "step-4, step-2: name one of them" in capfd.readouterr().err
    # load only: nothing is written
    assert run(tmp_path, "a", **{**flags, "training__steps": 6}, checkpoint__load_only="true") == [0]
    assert complete_steps(folder) == [4, 2]


def test_the_last_save_is_weights_in_the_export_type(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = {
        **SMALL,
        "checkpoint__interval": 2,
        "training__steps": 3,
        "checkpoint__last_save_model_only": "true",
        "checkpoint__export_dtype": "bfloat16",
    }
    assert run(tmp_path, "a", 2, **flags) == [0, 0]
    last = tensors(tmp_path, "a", 3)
    assert set(last) == {key for key in tensors(tmp_path, "a", 2) if key.startswith("model.")}
    assert {tensor.dtype for tensor in last.values()} == {torch.bfloat16}
    # finished with it; for more steps the last full state is taken
    assert run(tmp_path, "a", 2, **flags) == [0, 0]
    capfd.readouterr()
    assert run(tmp_path, "a", 2, **{**flags, "training__steps": 4}) == [0, 0]
    said = capfd.readouterr().err
    assert "holds only weights" in said and "continuing after step 2" in said
    for step in (2, 4):
        shutil.rmtree(folder_of(tmp_path, "a") / f"step-{step}")
    assert run(tmp_path, "a", 2, **{**flags, "training__steps": 5}) == [2, 2]
    assert "last_save_model_only = false" in capfd.readouterr().err


@pytest.mark.slow
def test_a_seed_checkpoint_starts_any_layout(tmp_path: Path) -> None:
    assert run(tmp_path, "a", 2, **SMALL, checkpoint__create_seed_checkpoint="true") == [0, 0]
    assert complete_steps(folder_of(tmp_path, "a")) == [0]
    assert not (tmp_path / "a" / "metrics.jsonl").read_text()
    assert run(tmp_path, "a", 1, **SMALL, training__steps=2) == [0]
    assert run(tmp_path, "b", 1, **SMALL, training__steps=2) == [0]
    assert_same_tensors(tensors(tmp_path, "a", 2), tensors(tmp_path, "b", 2))


def test_the_step_at_which_the_data_ends_is_saved(tmp_path: Path) -> None:
    flags = {**SMALL, "checkpoint__interval": 5, "training__epochs": 1, "training__steps": 100}
    for _ in range(2):
        assert run(tmp_path, "a", **flags) == [0]
        assert complete_steps(folder_of(tmp_path, "a")) == [8, 5]  # 64 rows, 8 a step


def test_parts_can_be_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "a", **SMALL, training__steps=2) == [0]
    capfd.readouterr()
    for change, said in (
        ({"optimizer__name": "SGD"}, "optimizer.name = 'AdamW'"),
        ({"training__global_batch_size": 4}, "global_batch_size was 8, is 4"),
        ({"model__dim": 64}, "model.tok_embeddings.weight has shape (259, 32) there and (259, 64) here"),
    ):
        assert run(tmp_path, "a", **{**SMALL, "training__steps": 3, **change}) == [2]
        assert said in capfd.readouterr().err
    change = {"optimizer__name": "SGD", "training__seed": 3, "training__steps": 3}
    left_out = {"checkpoint__exclude_from_loading": '["optimizer", "dataloader"]'}
    assert run(tmp_path, "a", **SMALL, **change, **left_out) == [0]
    assert "without optimizer, dataloader" in capfd.readouterr().err


def test_a_folder_in_use_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, "a")
    folder.mkdir(parents=True)
    lock = Lock(folder)
    assert run(tmp_path, "a", 2, **SMALL) == [2, 2]
    said = capfd.readouterr().err
    assert said.count("refused:") == 1 and f"process {os.getpid()} on" in said
    assert not (tmp_path / "a" / "config.toml").exists()  # the other run's files are untouched
    lock.release()


def limited(words: list[str], rank_with_limit: int, limit: int) -> int:
    """Trains; one rank may write files of at most `limit` bytes."""
    if int(os.environ["RANK"]) == rank_with_limit:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as on a full disk: the write fails, nobody is killed
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return train(words)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_rank_that_cannot_write_stops_all(
    tmp_path: Path, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case 054 (c): rank 1 alone; the save before it still loads, nothing claims the failed one."""
    flags = {**SMALL, "checkpoint__async_mode": mode}
    assert run(tmp_path, "a", 2, **flags, training__steps=2) == [0, 0]
    argv = words(tmp_path, "a", **flags, training__steps=9)
    capfd.readouterr()
    assert run_ranks(limited, 2, argv, 1, 20_000, timeout=60) == [1, 1]
    said = capfd.readouterr().err
    assert f"errno {errno.EFBIG}" in said and "rank-00001.safetensors" in said and "rank 1" in said
    assert "step-3: saved" not in said and "step-3: complete" not in said
    assert complete_steps(folder_of(tmp_path, "a")) == [2, 1]
    assert run(tmp_path, "a", 2, **flags, training__steps=3) == [0, 0]


def loses_folder(words: list[str], folder: Path, step: int) -> int:
    """Trains; when this step is complete, the folder moves away and a file takes its name."""
    finish = save.complete

    def then_move(partial: Path, done: int) -> Path:
        target = finish(partial, done)
        if done == step:
            folder.rename(folder.with_name("moved"))
            folder.write_text("")
        return target

    save.complete = then_move
    return train(words)


def test_a_folder_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Case 054 (a), (b), in a way that stops the superuser too: refused before the first step; or when it comes."""
    folder = folder_of(tmp_path, "a")
    folder.parent.mkdir()
    folder.write_text("a file, no folder")
    assert run(tmp_path, "a", 2, **SMALL) == [2, 2]
    said = capfd.readouterr().err
    assert said.count("refused:") == 1 and str(folder) in said and f"errno {errno.EEXIST}" in said
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
    folder.unlink()
    argv = words(tmp_path, "a", **SMALL)
    assert run_ranks(loses_folder, 2, argv, folder, 3, timeout=60) == [1, 1]
    said = capfd.readouterr().err
    assert "step 4 could not be saved" in said and f"errno {errno.ENOTDIR}" in said and str(folder) in said
    assert complete_steps(folder.with_name("moved")) == [3, 2, 1]


def test_what_the_keys_cannot_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = {
        "checkpoint__interval": 0,
        "checkpoint__keep_latest_k": -1,
        "checkpoint__load_step": -2,
        "checkpoint__last_save_in_hf": "true",
        "checkpoint__initial_load_in_hf": "true",
        "checkpoint__exclude_from_loading": '["lr_scheduler"]',
        "checkpoint__initial_load_in_hf_quantized": "true",
        "job__max_minutes": -1,
    }
    assert run(tmp_path, "a", 1, **flags) == [2]
    said = capfd.readouterr().err
    for key in flags:
        assert key.replace("__", ".").removeprefix("checkpoint.") in said, key
    assert run(
        tmp_path, "a", 1, checkpoint__enable="false", checkpoint__load_only="true", checkpoint__load_step=3
    ) == [2]
    assert capfd.readouterr().err.count("checkpoint.enable = true") == 2
