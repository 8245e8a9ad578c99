"""`tokens`: ready-made rows, used exactly as they are.

One JSON object a line: {"tokens": [...], "labels": [...], "document_ids": [...], "positions": [...]}, all lists of
one length; only "tokens" is needed. Label i belongs to token i, -100 is ignored. Without labels: the next token of
the same document. Without document_ids: a row is one document. Without positions: 0, 1, 2, ... in each document.

A row shorter than seq_len is filled up with token 0, label -100, in document -1, so the real tokens never see it
and no expert gets it. Rows are kept in memory (16 bytes a token); large sets belong into token shards.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan5d.data.dataset import IGNORE, PADDING, Rows
from titan5d.data.errors import DataError

KEYS = ("tokens", "labels", "document_ids", "positions")
MAX_ID = 2**31 - 1


class TokenRows:
    """The rows of JSONL files, in file order, padded to `seq_len`.

    With `document_mask` False the tokens of a row count as one document (positions 0..S-1), as in packing.
    Raises DataError naming file, line and numbers for any row that cannot be used; nothing is skipped but blank lines.
    """

    def __init__(self, files: list[Path], seq_len: int, document_mask: bool = True) -> None:
        rows = [_padded(row, seq_len) for file in files for row in _read(file, seq_len)]
        if not rows:
            raise DataError(f"no row in {', '.join(map(str, files))}: the files are empty")
        table = np.stack(rows)  # (N, 4, S) int32: tokens, labels, document ids, positions
        self._tokens, self._labels, self._document_ids, self._positions = np.moveaxis(table, 1, 0)
        if not document_mask:
            self._document_ids = np.where(self._document_ids == PADDING, PADDING, np.int32(0))
            self._positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), self._positions.shape)
        self.seq_len = seq_len
        self.n_samples = len(rows)
        self.max_token_id = max(int(self._tokens.max()), int(self._labels.max()))
        self.fingerprint = hashlib.sha256(np.ascontiguousarray(table).tobytes()).hexdigest()[:16]
        names = ", ".join(map(str, files))
        self.description = f"{len(rows):,} ready-made rows of up to {seq_len} tokens from {names}"

    def rows(self, sample_ids: npt.NDArray[np.int64]) -> Rows:
        """See Dataset.rows."""
        document_ids = self._document_ids[sample_ids]
        return Rows(
            tokens=self._tokens[sample_ids].astype(np.int64),
            labels=self._labels[sample_ids].astype(np.int64),
            positions=self._positions[sample_ids].astype(np.int64),
            document_ids=document_ids,
            several_documents=bool((document_ids != document_ids[:, :1]).any()),
        )


def _read(file: Path, seq_len: int) -> list[npt.NDArray[np.int32]]:
    """The rows of one file, each (4, length) int32."""
    rows = []
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_row(line, f"{file}, line {number}", seq_len))
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    return rows


def _row(line: bytes, where: str, seq_len: int) -> npt.NDArray[np.int32]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: broken JSON ({error})") from error
    if not isinstance(record, dict) or "tokens" not in record:
        raise DataError(f'{where}: a row is a JSON object with "tokens"')
    unknown = sorted(set(record) - set(KEYS))
    if unknown:
        raise DataError(f"{where}: unknown keys {unknown}; a row has {', '.join(KEYS)}")
    tokens = _numbers(record["tokens"], "tokens", 0, MAX_ID, where)
    n = len(tokens)
    if n == 0:
        raise DataError(f"{where}: the row has no token")
    if n > seq_len:
        raise DataError(
            f"{where}: the row has {n} tokens, seq_len = {seq_len}: cut the row or raise seq_len to {n}"
        )
    ids = np.zeros(n, np.int32)
    if "document_ids" in record:
        ids = _numbers(record["document_ids"], "document_ids", 0, MAX_ID - 1, where, n)
    starts = np.flatnonzero(np.diff(ids)) + 1  # where the document id changes
    if len(starts) + 1 > len(np.unique(ids)):
        raise DataError(
            f"{where}: a document id comes back after another; the tokens of a document stand together"
        )
    if "labels" in record:
        labels = _numbers(record["labels"], "labels", IGNORE, MAX_ID, where, n)
        if ((labels < 0) & (labels != IGNORE)).any():
            raise DataError(
                f"{where}: a label is a token id or -100 (no target), not another negative number"
            )
    else:
        labels = np.append(tokens[1:], np.int32(IGNORE))
        labels[starts - 1] = IGNORE
    if "positions" in record:
        positions = _numbers(record["positions"], "positions", 0, seq_len - 1, where, n)
    else:
        first = np.zeros(n, np.int32)
        first[starts] = starts
        positions = np.arange(n, dtype=np.int32) - np.maximum.accumulate(first)
    return np.stack([tokens, labels, ids, positions])


def _numbers(
    value: Any, key: str, low: int, high: int, where: str, length: int | None = None
) -> npt.NDArray[np.int32]:
    """A list of whole numbers in [low, high], of `length` if given, as int32."""
    if not isinstance(value, list) or any(type(x) is not int for x in value):
        raise DataError(f'{where}: "{key}" is no list of whole numbers')
    if length is not None and len(value) != length:
        raise DataError(f'{where}: {length} tokens but {len(value)} "{key}"')
    if value and not (low <= min(value) and max(value) <= high):
        wrong = min(value) if min(value) < low else max(value)
        raise DataError(f'{where}: {wrong} in "{key}" is outside {low}..{high}')
    return np.array(value, dtype=np.int32)


def _padded(row: npt.NDArray[np.int32], seq_len: int) -> npt.NDArray[np.int32]:
    """(4, length) -> (4, S)."""
    n = row.shape[1]
    if n == seq_len:
        return row
    padding = np.empty((4, seq_len - n), np.int32)
    padding[0], padding[1] = 0, IGNORE
    padding[2] = PADDING
    padding[3] = np.arange(seq_len - n)
    return np.concatenate([row, padding], axis=1)
