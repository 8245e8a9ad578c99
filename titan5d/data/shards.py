"""Token shards on disk: what every text data set is turned into before training, read by memory map.

    DIR/meta.json          counts, dtype, tokenizer, source, fingerprint; written last, so it marks a whole set
    DIR/shard-00000.bin    token ids, uint16 or uint32, little endian, documents one after the other
    DIR/shard-00000.idx    int64, little endian: where each document starts, then the number of tokens

Read as one stream: shard after shard, document after document, each with its BOS (if any) and EOS inside.
"""

from __future__ import annotations

import functools
import hashlib
import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan5d.data.errors import DataError

FORMAT = "titan5d-tokens"
VERSION = 1
OFFSET_DTYPE = np.dtype("<i8")
REBUILD = "delete the folder and build the shards again"
MAX_OPEN_SHARDS = 128  # each keeps two files mapped; 1,024 open files is a common limit


class TokenShards:
    """A folder of token shards as one stream of `n_tokens` ids.

    Raises DataError when the folder is no complete set of shards, or a file has not the size that meta.json says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = read_meta(folder)
        self.dtype = np.dtype(self.meta["dtype"])
        self.n_tokens: int = self.meta["tokens"]
        self.n_documents: int = self.meta["documents"]
        self.max_token_id: int = self.meta["max_token_id"]
        self.fingerprint: str = self.meta["fingerprint"]
        self._names = [shard["name"] for shard in self.meta["shards"]]
        self._starts = [0, *accumulate(shard["tokens"] for shard in self.meta["shards"])]
        for shard in self.meta["shards"]:
            check_sizes(folder, shard, self.dtype)
        self._open = functools.lru_cache(maxsize=MAX_OPEN_SHARDS)(self._map)

    def read_into(self, out: npt.NDArray[np.int64], start: int) -> None:
        """Copies tokens [start, start + len(out)) of the stream into `out`. The range must lie inside the stream."""
        done = 0
        while done < len(out):
            shard = bisect_right(self._starts, start + done) - 1
            here = start + done - self._starts[shard]
            tokens, _ = self._open(shard)
            part = tokens[here : here + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Places p of the stream, start <= p < stop, at which a document starts."""
        found = []
        shard = bisect_right(self._starts, start) - 1
        while shard < len(self._names) and self._starts[shard] < stop:
            base = self._starts[shard]
            _, offsets = self._open(shard)
            first, last = np.searchsorted(offsets, (start - base, stop - base))
            last = min(last, len(offsets) - 1)  # the last entry is the shard's end, no start
            found.append(offsets[first:last] + base)
            shard += 1
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def verify(self) -> None:
        """Reads every byte. Raises DataError at the first shard that is not what was written."""
        for shard in self.meta["shards"]:
            digest = content_digest(self.folder / shard["name"])
            if digest != shard["sha256"]:
                raise DataError(
                    f"{self.folder / shard['name']}: contents changed since they were written; {REBUILD}"
                )

    def _map(self, shard: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        path = self.folder / self._names[shard]
        # A plain array over the mapped file: slicing np.memmap itself costs more than reading the tokens.
        tokens = np.asarray(np.memmap(path.with_suffix(".bin"), dtype=self.dtype, mode="r"))
        offsets = np.asarray(np.memmap(path.with_suffix(".idx"), dtype=OFFSET_DTYPE, mode="r"))
        return tokens, offsets


def read_meta(folder: Path) -> dict[str, Any]:
    """The checked meta.json of a folder of shards."""
    file = folder / "meta.json"
    if not folder.is_dir():
        raise DataError(
            f"no token shards at {folder}: there is no such folder (make one with `titan5d data build`)"
        )
    if not file.is_file():
        unfinished = (folder / "plan.json").is_file()
        hint = (
            "the build did not finish, run it again"
            if unfinished
            else "make shards with `titan5d data build`"
        )
        raise DataError(f"no token shards in {folder}: meta.json is missing; {hint}")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DataError(f"{file} does not describe token shards: its format is not {FORMAT!r}")
    if meta["version"] != VERSION:
        raise DataError(
            f"{file}: format version {meta['version']}, this titan5d reads version {VERSION}; {REBUILD}"
        )
    return meta


def check_sizes(folder: Path, shard: dict[str, Any], dtype: np.dtype[Any]) -> None:
    """Raises DataError when a file of the shard is missing or has another size than its counts ask for."""
    sizes = {
        ".bin": shard["tokens"] * dtype.itemsize,
        ".idx": (shard["documents"] + 1) * OFFSET_DTYPE.itemsize,
    }
    for suffix, size in sizes.items():
        file = folder / (shard["name"] + suffix)
        if not file.is_file():
            raise DataError(f"token shard {file} is missing; {REBUILD}")
        found = file.stat().st_size
        if found != size:
            raise DataError(f"token shard {file} has {found} bytes, its counts ask for {size}; {REBUILD}")


def content_digest(path: Path) -> str:
    """sha256 of a shard's tokens and document offsets (`path` without suffix)."""
    digest = hashlib.sha256()
    for suffix in (".bin", ".idx"):
        with open(path.with_suffix(suffix), "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
