"""Documents from parquet files and from the Hugging Face hub. Needs the optional extra: pip install titan5d[hf].

The two libraries are imported inside the functions that need them, so that every other data set works without.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan5d.data.corpus import FileList, FileRange, Piece, checked_text, describe, group
from titan5d.data.errors import DataError

ROWS_AT_A_TIME = 256


class ParquetFiles:
    """One column of parquet files; every row is a document. Pieces are runs of row groups."""

    def __init__(self, files: list[Path], where: str, column: str = "text") -> None:
        parquet = _import_pyarrow_parquet()
        self._files = FileList(files)
        self._column = column
        self.description = describe(where, len(files), f"parquet, text in column {column!r}")
        for file in files:
            try:
                names = parquet.ParquetFile(file).schema_arrow.names
            except Exception as error:  # pyarrow has its own error classes
                raise DataError(f"cannot read {file} as parquet: {error}") from error
            if column not in names:
                raise DataError(
                    f"{file} has no column {column!r}, it has {', '.join(names)}: name one as parquet({names[0]})"
                )

    def fingerprint(self) -> str:
        return self._files.digest("parquet", self._column)

    def total_bytes(self) -> int:
        return self._files.total_bytes()

    def plan(self, piece_bytes: int) -> tuple[list[Piece], Counter[str]]:
        parquet = _import_pyarrow_parquet()
        ranges = []
        for path, _, _ in self._files.files:
            metadata = parquet.ParquetFile(path).metadata
            for i in range(metadata.num_row_groups):
                ranges.append(FileRange(path, i, i + 1, metadata.row_group(i).total_byte_size))
        return group(ranges, piece_bytes), Counter()

    def documents(self, piece: Piece, skipped: Counter[str]) -> Iterator[str]:
        parquet = _import_pyarrow_parquet()
        for part in piece.ranges:
            try:
                file = parquet.ParquetFile(part.path)
                groups = list(range(part.start, part.stop))
                for batch in file.iter_batches(ROWS_AT_A_TIME, row_groups=groups, columns=[self._column]):
                    for value in batch.column(0).to_pylist():
                        text = checked_text(value, skipped)
                        if text is not None:
                            yield text
            except Exception as error:
                raise DataError(f"cannot read {part.path}: {error}") from error


class HubDataset:
    """A data set of the Hugging Face hub, streamed: `owner/name`, `owner/name:config`, `owner/name:config:split`.

    The whole split is tokenized once. Pieces are the files the hub keeps it in; the hub's own version is part of
    the fingerprint, so a new version is tokenized anew.
    """

    def __init__(self, name: str | None, split: str, column: str = "text") -> None:
        _import_datasets()  # a missing extra is said at once
        if not name:
            raise DataError("the data set `hub` needs dataset_path: owner/name[:config[:split]]")
        self._name, self._config, self._split = ([*name.split(":"), "", ""])[:3]
        self._split = self._split or split
        self._column = column
        self.description = f"hub data set {name} split {self._split}, text in column {column!r}"

    def fingerprint(self) -> str:
        builder = self._call("load_dataset_builder")
        parts = (self._name, self._config, self._split, self._column, str(builder.info.version), builder.hash)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def total_bytes(self) -> int:
        splits = self._call("load_dataset_builder").info.splits or {}
        known = splits[self._split].num_bytes if self._split in splits else None  # not every data set tells
        return known or 0

    def plan(self, piece_bytes: int) -> tuple[list[Piece], Counter[str]]:
        n_shards = self._open().num_shards
        bytes_each = self.total_bytes() // n_shards
        return [Piece((FileRange(self._name, i, n_shards, bytes_each),)) for i in range(n_shards)], Counter()

    def documents(self, piece: Piece, skipped: Counter[str]) -> Iterator[str]:
        for part in piece.ranges:
            for record in self._open().shard(num_shards=part.stop, index=part.start):
                text = checked_text(record.get(self._column), skipped)
                if text is not None:
                    yield text

    def _open(self) -> Any:
        return self._call("load_dataset", split=self._split, streaming=True)

    def _call(self, function: str, **arguments: Any) -> Any:
        try:
            return getattr(_import_datasets(), function)(self._name, self._config or None, **arguments)
        except Exception as error:  # network, unknown name, unknown config: all the library's own classes
            raise DataError(f"cannot open the {self.description}: {error}") from error


def _import_pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"parquet files need the optional extra: pip install titan5d[hf] ({error})"
        ) from error
    return pyarrow.parquet


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"hub data sets need the optional extra: pip install titan5d[hf] ({error})"
        ) from error
    return datasets
