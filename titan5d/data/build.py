"""Builds token shards from a source: in parallel, resumable, and whole or not there.

    plan.json               what is being built; a later build with the same plan continues it
    shard-00000.{bin,idx}   renamed into place when they are on disk
    shard-00000.json        the record of a finished shard
    meta.json               written last; then plan and records go

The result depends on the documents and the tokenizer only, not on how many workers built it or how often the
build was stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan5d.data.corpus import Source
from titan5d.data.encode import ShardJob, encode_piece, finished_shard, shard_name, write_json
from titan5d.data.errors import DataError
from titan5d.data.shards import FORMAT, VERSION, TokenShards, read_meta
from titan5d.data.tokenizer import Tokenizer
from titan5d.data.workers import encode_pieces, usable_cores

PROGRESS_EVERY_S = 3.0
SMALL_BYTES = 1 << 20  # starting a worker process takes longer than encoding this much
Log = Callable[[str], None]


def build_shards(
    source: Source,
    tokenizer: Tokenizer,
    out_dir: Path,
    workers: int | None = None,
    piece_bytes: int | None = None,
    log: Log = print,
) -> TokenShards:
    """Tokenizes every document of `source` into `out_dir` and returns the opened shards.

    workers: processes; default one per usable core. piece_bytes: source bytes per shard; default a 64th of the
    whole, between 4 and 256 MiB. Memory per worker: a few times the largest document, plus about 100 MB.

    A folder that holds the same tokens already is opened at once; an unfinished one is continued.
    Raises DataError when the folder holds other tokens, a file cannot be read, the source changes while it is
    read, the disk is full, or no document is left.
    """
    if piece_bytes is not None and piece_bytes < 1:
        raise DataError(f"piece_bytes = {piece_bytes}: a shard needs at least 1 byte of source")
    if workers is not None and workers < 1:
        raise DataError(f"workers = {workers}: at least 1 is needed")
    identity = {"source": source.fingerprint(), "tokenizer": tokenizer.fingerprint, "version": VERSION}
    if (out_dir / "meta.json").is_file():
        return _open_same(out_dir, identity)

    total_bytes = source.total_bytes()
    piece_bytes = piece_bytes or min(max(total_bytes // 64, 4 << 20), 256 << 20)
    pieces, skipped = source.plan(piece_bytes)
    log(f"data: tokenizing {source.description}, {total_bytes / 1e6:.1f} MB, into {out_dir}")
    try:
        _start_or_continue(out_dir, identity | {"piece_bytes": piece_bytes, "pieces": len(pieces)})
        job = ShardJob(source, tokenizer, out_dir)
        todo = [(i, piece) for i, piece in enumerate(pieces) if finished_shard(out_dir, i, job.dtype) is None]
        if len(todo) < len(pieces):
            log(f"data: {len(pieces) - len(todo)} of {len(pieces)} shards are there already")
        progress = _Progress(sum(piece.n_bytes for _, piece in todo), log)
        workers = workers or usable_cores()
        if sum(piece.n_bytes for _, piece in todo) <= SMALL_BYTES:
            for index, piece in todo:
                for chars in encode_piece(job, index, piece):
                    progress.add(chars)
        else:
            encode_pieces(job, todo, workers, progress.add)
        if source.fingerprint() != identity["source"]:
            raise DataError(
                f"{source.description}: files changed while they were tokenized; run it again when they are complete"
            )
        _finish(job, len(pieces), identity, skipped)
    except OSError as error:
        raise DataError(f"data build: writing to {out_dir} failed: {error}") from error
    finally:
        for leftover in out_dir.glob("shard-?????-*"):  # of a worker that was killed or ended
            leftover.unlink(missing_ok=True)
    shards = TokenShards(out_dir)
    log(f"data: {summary(shards.meta)} in {progress.seconds():.1f} s")
    return shards


def summary(meta: dict[str, Any]) -> str:
    """Counts for people: documents, tokens, and what was left out by reason."""
    skipped = _reasons(meta["skipped"]) or "none"
    return f"{meta['documents']:,} documents, {meta['tokens']:,} tokens, skipped: {skipped}"


def _reasons(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))


def _open_same(out_dir: Path, identity: dict[str, Any]) -> TokenShards:
    meta = read_meta(out_dir)
    there = {
        "source": meta["source"]["fingerprint"],
        "tokenizer": meta["tokenizer"]["fingerprint"],
        "version": meta["version"],
    }
    if there != identity:
        differing = " and ".join(key for key in identity if there[key] != identity[key])
        raise DataError(
            f"{out_dir} already holds token shards of another {differing} ({meta['source']['description']}; tokenizer "
            f"{meta['tokenizer']['name']}). Choose another folder or delete this one"
        )
    return TokenShards(out_dir)


def _start_or_continue(out_dir: Path, plan: dict[str, Any]) -> None:
    """Leaves in `out_dir` only shards that belong to `plan`."""
    out_dir.mkdir(parents=True, exist_ok=True)
    file = out_dir / "plan.json"
    try:
        same = json.loads(file.read_text(encoding="utf-8")) == plan
    except (OSError, ValueError):
        same = False
    if not same:
        for leftover in out_dir.glob("shard-*.json"):  # without its record a shard is written anew
            leftover.unlink()
        write_json(file, plan)


def _finish(job: ShardJob, n_pieces: int, identity: dict[str, Any], skipped: Counter[str]) -> None:
    """Joins the records into meta.json, then removes them and the plan."""
    shards: list[dict[str, Any]] = []
    for index in range(n_pieces):
        record = finished_shard(job.folder, index, job.dtype)
        if record is None:
            raise DataError(
                f"data build: {job.folder / shard_name(index)} was there and is gone; does another build write here?"
            )
        skipped.update(record.pop("skipped"))
        shards.append(record)
    max_token_id = max((shard.pop("max_token_id") for shard in shards), default=-1)
    empty = [shard for shard in shards if shard["tokens"] == 0]
    shards = [shard for shard in shards if shard["tokens"] > 0]
    if not shards:
        raise DataError(
            f"no document in {job.source.description}: {_reasons(skipped) or 'the files are empty'}"
        )
    tokenizer = job.tokenizer
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": job.dtype.str,
        "tokens": sum(shard["tokens"] for shard in shards),
        "documents": sum(shard["documents"] for shard in shards),
        "max_token_id": max_token_id,
        "skipped": dict(skipped),
        "fingerprint": hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest()[:16],
        "source": {"description": job.source.description, "fingerprint": identity["source"]},
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        },
        "shards": shards,
    }
    write_json(job.folder / "meta.json", meta)
    _sync_folder(job.folder)
    for shard in empty:
        for suffix in (".bin", ".idx"):
            (job.folder / (shard["name"] + suffix)).unlink(missing_ok=True)
    for record_file in [*job.folder.glob("shard-*.json"), job.folder / "plan.json"]:
        record_file.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Puts the renames on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Progress:
    """A line every few seconds: share done, speed, time left. Speed counts from the first batch on: starting
    the workers takes a moment."""

    def __init__(self, total: int, log: Log) -> None:
        self._total, self._log = max(total, 1), log
        self._done = self._first_done = 0
        self._started = self._said = self._first = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def add(self, chars: int) -> None:
        """Counts characters as bytes: close enough for a time left."""
        now = time.monotonic()
        if self._done == 0:
            self._first, self._said, self._first_done = now, now, chars
        self._done += chars
        if now - self._said < PROGRESS_EVERY_S:
            return
        self._said = now
        share = min(self._done / self._total, 1.0)
        speed = (self._done - self._first_done) / (now - self._first)
        left = max(self._total - self._done, 0) / max(speed, 1.0)
        total_mb = self._total / 1e6
        self._log(f"data: {share:.0%} of {total_mb:.1f} MB, {speed / 1e6:.1f} MB/s, {left:.0f} s left")
