"""Text data sets by name: which source of documents a name and a path stand for. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from titan5d.data.corpus import LineFiles, Source, TextFiles, find_files
from titan5d.data.errors import DataError
from titan5d.data.parquet import HubDataset, ParquetFiles
from titan5d.data.pysrc import PythonSources, Split

TEXT_NAMES = ("pysrc", "text", "text_lines", "text_files", "jsonl", "parquet", "hub")
KEYED_NAMES = ("jsonl", "parquet", "hub")  # take the key or column of the text in parentheses
DEFAULT_KEY = "text"


def text_source(name: str, path: str | None, key: str = DEFAULT_KEY, split: Split = "train") -> Source:
    """The documents of a text data set (one of TEXT_NAMES)."""
    where = path or ""
    if name == "pysrc":
        if path:
            raise DataError(
                f"pysrc reads the installed Python sources and takes no dataset_path, got {path!r}"
            )
        return PythonSources(split)
    if name == "hub":
        return HubDataset(path, split, key)
    if name == "jsonl":
        return LineFiles(find_files(path, (".jsonl", ".json")), where, json_key=key)
    if name == "parquet":
        return ParquetFiles(find_files(path, (".parquet",)), where, key)
    files = find_files(path)
    # A folder of files is a document each, a named file or glob a document a line, unless the name says which.
    by_file = name == "text_files" or (name == "text" and Path(where).expanduser().is_dir())
    return TextFiles(files, where) if by_file else LineFiles(files, where)
