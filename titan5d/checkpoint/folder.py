"""The checkpoint folder of a run: its names, its lock, and which of its checkpoints are kept.

    step-400                  complete when it holds a manifest.json; anything else is never loaded nor counted
    step-800.partial-a1b2     being written; renamed when complete
    step-100.leaving-a1b2     being deleted
    .lock                     held by the run that writes here

Other names are left alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from pathlib import Path

from titan5d.checkpoint.errors import CheckpointRefused
from titan5d.checkpoint.manifest import NAME
from titan5d.checkpoint.tensor_file import flush_folder

COMPLETE = re.compile(r"step-(0|[1-9]\d*)")
LEFTOVER = re.compile(r"step-\d+\.(partial|leaving)-[0-9a-f]{8}")


def step_folders(folder: Path) -> dict[int, Path]:
    """Step -> folder, by name, newest first; complete or not."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): one for one in folder.iterdir() if (match := COMPLETE.fullmatch(one.name))}
    return {step: found[step] for step in sorted(found, reverse=True)}


def complete_steps(folder: Path) -> list[int]:
    """Steps whose checkpoint is complete, newest first. Their files are not read."""
    return [step for step, one in step_folders(folder).items() if (one / NAME).is_file()]


def partial_name(step: int) -> str:
    return f"step-{step}.partial-{secrets.token_hex(4)}"


def complete(partial: Path, step: int) -> Path:
    """Gives a checkpoint whose manifest is written its name; what had the name before makes room. Raises OSError."""
    folder = partial.parent
    target = folder / f"step-{step}"
    flush_folder(partial)
    old = _leaving(target) if target.exists() else None
    if old is not None:
        target.rename(old)
    partial.rename(target)
    flush_folder(folder)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return target


def keep_latest(folder: Path, k: int, just_saved: int) -> list[int]:
    """Deletes all complete checkpoints but the one just saved and the k - 1 newest others; 0 keeps all.

    Incomplete folders and foreign names are neither counted nor deleted. Returns the steps that left.
    """
    if k == 0:
        return []
    others = [step for step in complete_steps(folder) if step != just_saved]
    for step in others[k - 1 :]:
        leaving = _leaving(folder / f"step-{step}")
        (folder / f"step-{step}").rename(leaving)  # at once: a crash in the middle leaves no half checkpoint
        shutil.rmtree(leaving, ignore_errors=True)
    return others[k - 1 :]


def _leaving(target: Path) -> Path:
    return target.with_name(f"{target.name}.leaving-{secrets.token_hex(4)}")


def remove_leftovers(folder: Path) -> None:
    """Deletes what a run that ended in the middle of a save or a deletion has left. Only with the lock."""
    for one in folder.iterdir():
        if LEFTOVER.fullmatch(one.name):
            shutil.rmtree(one, ignore_errors=True)


def check_writable(folder: Path, rank: int, needed: int) -> list[str]:
    """Problems with writing `needed` bytes more into the folder from this rank, found by trying."""
    probe = folder / f".write-test-{rank}-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"titan5d")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return [f"checkpoint.folder {folder} cannot be written: {error.strerror} (errno {error.errno})"]
    if free < needed:
        return [
            f"checkpoint.folder {folder} has {free / 1e9:.2f} GB free, one checkpoint of this run needs"
            f" {needed / 1e9:.2f} GB"
        ]
    return []


class Lock:
    """One run at a time writes into a folder. The kernel drops the lock with the process, also with kill -9."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointRefused naming the run that holds the lock; OSError when the file cannot be written."""
        self.path = folder / ".lock"
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = _holder(os.pread(self._handle, 4096, 0))
                os.close(self._handle)
                raise CheckpointRefused(
                    [
                        f"{folder} is in use by another run ({holder}); stop it, or give this one its own"
                        " job.dump_folder or checkpoint.folder"
                    ]
                ) from None
            # a file system without locks: the file still says who writes here
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)

    def release(self) -> None:
        os.close(self._handle)


def _holder(text: bytes) -> str:
    try:
        who = json.loads(text)
        return f"process {who['pid']} on {who['host']}"
    except (ValueError, KeyError, TypeError):
        return "its process is not known"
