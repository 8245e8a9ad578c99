"""One piece of a source becomes one token shard: the work of one worker of a build."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan5d.data.corpus import Piece, Source
from titan5d.data.shards import OFFSET_DTYPE, check_sizes, content_digest
from titan5d.data.tokenizer import Tokenizer

BATCH_CHARS = 1 << 18  # text encoded at a time; bounds the memory of a worker


@dataclass(frozen=True)
class ShardJob:
    """What every worker of a build gets once."""

    source: Source
    tokenizer: Tokenizer
    folder: Path

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.tokenizer.vocab_size)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def shard_name(index: int) -> str:
    return f"shard-{index:05d}"


def encode_piece(job: ShardJob, index: int, piece: Piece) -> Iterator[int]:
    """Writes the shard of one piece; yields the characters done after each batch.

    The files are written under a temporary name and renamed when they are on disk; the record
    (shard-NNNNN.json) comes last, so a shard with a record is whole whatever happens to this process.
    """
    skipped: Counter[str] = Counter()
    offsets = array("q", [0])
    highest = -1
    path = job.folder / shard_name(index)
    partial = job.folder / f"{path.name}-{os.getpid()}"
    try:
        with open(partial.with_suffix(".bin"), "wb") as file:
            for texts in _batches(job.source.documents(piece, skipped)):
                for ids in job.tokenizer.encode_batch(texts):
                    document = np.array(job.tokenizer.with_ends(ids), dtype=job.dtype)
                    highest = max(highest, int(document.max()))
                    file.write(document.tobytes())
                    offsets.append(offsets[-1] + len(document))
                yield sum(len(text) for text in texts)
            _to_disk(file)
        with open(partial.with_suffix(".idx"), "wb") as file:
            file.write(np.array(offsets, dtype=OFFSET_DTYPE).tobytes())
            _to_disk(file)
        record = {
            "name": path.name,
            "tokens": offsets[-1],
            "documents": len(offsets) - 1,
            "max_token_id": highest,
            "skipped": dict(skipped),
            "sha256": content_digest(partial),
        }
        for suffix in (".bin", ".idx"):
            os.replace(partial.with_suffix(suffix), path.with_suffix(suffix))
        write_json(path.with_suffix(".json"), record)
    finally:
        for suffix in (".bin", ".idx"):
            partial.with_suffix(suffix).unlink(missing_ok=True)


def finished_shard(folder: Path, index: int, dtype: np.dtype[Any]) -> dict[str, Any] | None:
    """The record of a shard that an earlier build finished, or None."""
    file = folder / f"{shard_name(index)}.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        check_sizes(folder, record, dtype)
    except (OSError, ValueError, KeyError):
        return None
    return record


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes beside, syncs, renames: the file is whole or not there."""
    partial = path.with_name(f"{path.name}-{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            _to_disk(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    chars = 0
    for text in documents:
        batch.append(text)
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
