"""Text data sets are tokenized once per machine: into a cache folder, by one process, while the others wait.

    <cache>/<key>/        the shards; key = source + tokenizer, so other files or another tokenizer build anew
    <cache>/<key>.lock    held (flock) by the process that builds; free again when that process ends, however

A second start finds meta.json and opens it at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan5d.data.build import Log, build_shards
from titan5d.data.corpus import Source
from titan5d.data.errors import DataError
from titan5d.data.shards import VERSION, TokenShards
from titan5d.data.tokenizer import Tokenizer

DEFAULT_CACHE = Path("~/.cache/titan5d/data")
STALL_LIMIT_S = 900.0  # waiting ends when the builder finishes no shard for this long
POLL_S = 0.2
SAY_EVERY_S = 10.0


def cached_shards(
    source: Source,
    tokenizer: Tokenizer,
    cache_dir: Path | None = None,
    workers: int | None = None,
    log: Log = print,
    stall_limit_s: float = STALL_LIMIT_S,
) -> TokenShards:
    """The shards of `source`, from the cache or built into it.

    Any number of processes may call this at once: one builds, the others wait and report its progress.
    Raises DataError when the cache folder cannot be written, or the builder finishes no shard for `stall_limit_s`.
    """
    root = (cache_dir or DEFAULT_CACHE).expanduser()
    identity = f"{VERSION} {source.fingerprint()} {tokenizer.fingerprint}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = root / key
    if not (folder / "meta.json").is_file():
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = os.open(root / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise DataError(
                f"cannot write the data cache {root}: {error.strerror}. Choose another with training.cache_folder"
            ) from error
        with _held(lock, folder, log, stall_limit_s):
            build_shards(source, tokenizer, folder, workers=workers, log=log)
    return TokenShards(folder)


@contextmanager
def _held(lock: int, folder: Path, log: Log, stall_limit_s: float) -> Iterator[None]:
    """Holds the file lock; waits for it while whoever has it gets on."""
    try:
        _acquire(lock, folder, log, stall_limit_s)
        yield
    finally:
        os.close(lock)  # also releases it


def _acquire(lock: int, folder: Path, log: Log, stall_limit_s: float) -> None:
    started = progressed = time.monotonic()
    said = 0.0
    seen = -1
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        now = time.monotonic()
        done = len(list(folder.glob("shard-*.json")))
        if done != seen:
            seen, progressed = done, now
        if now - progressed > stall_limit_s:
            raise DataError(
                f"waited {now - started:.0f} s for another process to tokenize into {folder}: it finished {done} "
                f"shards and none in the last {stall_limit_s:g} s. Look for it; when it is gone, start again"
            )
        if now - said > SAY_EVERY_S:
            said = now
            log(f"data: another process tokenizes into {folder}, {done} shards done, waiting")
        time.sleep(POLL_S)
