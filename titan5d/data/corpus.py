"""Documents from files: plain text and JSON lines.

A source is planned into pieces without reading it; each piece becomes one token shard, so pieces can be read
in parallel and a build that was stopped continues with the pieces that are missing:

    files:   |------ a.txt ------|-- b.txt --|- c.txt -|
    pieces:  |    0    |    1    |           2         |      byte ranges; a line belongs to where it starts

Every record that gives no document is counted under its reason; a file that cannot be read is an error.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from titan5d.data.errors import DataError

# Reasons under which records are counted as skipped.
EMPTY = "empty"
NOT_UTF8 = "invalid UTF-8"
BROKEN_JSON = "broken JSON"
NO_TEXT = "no text under the key"
DUPLICATE = "duplicate"


@dataclass(frozen=True)
class FileRange:
    """A part of one file: bytes [start, stop) for text and JSON lines, row groups for parquet."""

    path: str
    start: int
    stop: int
    n_bytes: int


@dataclass(frozen=True)
class Piece:
    """What one worker reads into one shard."""

    ranges: tuple[FileRange, ...]

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.ranges)


class Source(Protocol):
    """Where documents come from. Must pickle: the workers of a build get a copy."""

    description: str
    """One line for people."""

    def fingerprint(self) -> str:
        """16 hex digits that change when the documents may have changed. Cheap: reads no contents."""
        ...

    def total_bytes(self) -> int:
        """About how much there is to read."""
        ...

    def plan(self, piece_bytes: int) -> tuple[list[Piece], Counter[str]]:
        """The pieces in document order, each about `piece_bytes`, and what planning left out, by reason."""
        ...

    def documents(self, piece: Piece, skipped: Counter[str]) -> Iterator[str]:
        """The documents of a piece in order. Counts left-out records in `skipped`."""
        ...


class FileList:
    """The files of a source, in a fixed order, each with its size and time of change."""

    def __init__(self, files: list[Path]) -> None:
        self.files: list[tuple[str, int, int]] = []
        for file in files:
            try:
                stat = file.stat()
            except OSError as error:
                raise DataError(f"cannot read {file}: {error.strerror}") from error
            self.files.append((str(file), stat.st_size, stat.st_mtime_ns))

    def total_bytes(self) -> int:
        return sum(size for _, size, _ in self.files)

    def digest(self, *settings: str) -> str:
        return hashlib.sha256(repr((settings, self.files)).encode()).hexdigest()[:16]


class TextFiles:
    """Every file is one document."""

    def __init__(self, files: list[Path], where: str) -> None:
        self._files = FileList(files)
        self.description = describe(where, len(files), "a document a file")

    def fingerprint(self) -> str:
        return self._files.digest("text files")

    def total_bytes(self) -> int:
        return self._files.total_bytes()

    def plan(self, piece_bytes: int) -> tuple[list[Piece], Counter[str]]:
        ranges = [FileRange(path, 0, size, size) for path, size, _ in self._files.files]
        return group(ranges, piece_bytes), Counter()

    def documents(self, piece: Piece, skipped: Counter[str]) -> Iterator[str]:
        return whole_files(piece, skipped)


class LineFiles:
    """Every line is one record: the document itself, or with `json_key` a JSON object that holds it."""

    def __init__(self, files: list[Path], where: str, json_key: str | None = None) -> None:
        self._files = FileList(files)
        self._json_key = json_key
        form = "a document a line" if json_key is None else f"JSON lines, text under {json_key!r}"
        self.description = describe(where, len(files), form)

    def fingerprint(self) -> str:
        return self._files.digest("lines", self._json_key or "")

    def total_bytes(self) -> int:
        return self._files.total_bytes()

    def plan(self, piece_bytes: int) -> tuple[list[Piece], Counter[str]]:
        ranges = []
        for path, size, _ in self._files.files:
            cuts = [*range(0, size, piece_bytes), size]
            ranges += [FileRange(path, a, b, b - a) for a, b in pairwise(cuts)]
        return group(ranges, piece_bytes), Counter()

    def documents(self, piece: Piece, skipped: Counter[str]) -> Iterator[str]:
        for part in piece.ranges:
            for line in lines_of(part):
                text = decode(line, skipped)
                if text is not None and self._json_key is not None:
                    text = text_of_json(text, self._json_key, skipped)
                if text is not None:
                    yield text


def find_files(path: str | None, suffixes: tuple[str, ...] = ()) -> list[Path]:
    """The files that `path` (a file, a folder, or a glob with * ? [ ]) names, sorted.

    A folder is walked to the bottom, hidden names left out; `suffixes` restricts what is taken from it.
    Raises DataError when the path is not there or holds no such file.
    """
    if not path:
        raise DataError("this data set needs dataset_path: a file, a folder or a glob")
    given = Path(path).expanduser().absolute()
    if given.is_file():
        return [given]
    if given.is_dir():
        found = [Path(folder) / name for folder, _, names in _walk(given) for name in sorted(names)]
        found = [file for file in found if not suffixes or file.suffix in suffixes]
        kind = " or ".join(suffixes) if suffixes else "readable"
        if not found:
            raise DataError(f"the folder {given} holds no {kind} file")
        return found
    if any(char in path for char in "*?["):
        matches = [Path(match) for match in sorted(glob.glob(str(given), recursive=True))]
        found = [match for match in matches if match.is_file()]
        if not found:
            raise DataError(f"no file matches {path!r}")
        return found
    raise DataError(f"{path!r} does not exist: dataset_path is a file, a folder or a glob")


def describe(where: str, n_files: int, form: str) -> str:
    """A source in a few words, e.g. `corpus/ (24 files, a document a line)`."""
    return f"{where} ({form})" if n_files == 1 else f"{where} ({n_files:,} files, {form})"


def group(ranges: list[FileRange], piece_bytes: int) -> list[Piece]:
    """Neighbouring ranges put together until a piece holds at least `piece_bytes`."""
    pieces: list[Piece] = []
    current: list[FileRange] = []
    size = 0
    for part in ranges:
        current.append(part)
        size += part.n_bytes
        if size >= piece_bytes:
            pieces.append(Piece(tuple(current)))
            current, size = [], 0
    if current:
        pieces.append(Piece(tuple(current)))
    return pieces


def whole_files(piece: Piece, skipped: Counter[str]) -> Iterator[str]:
    """Each file of the piece as one document."""
    for part in piece.ranges:
        try:
            content = Path(part.path).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {part.path}: {error.strerror}") from error
        text = decode(content, skipped)
        if text is not None:
            yield text


def lines_of(part: FileRange) -> Iterator[bytes]:
    """The lines that start inside the byte range, without their line ends (LF or CR LF)."""
    try:
        with open(part.path, "rb") as file:
            if part.start > 0:
                file.seek(part.start - 1)
                file.readline()  # the rest of a line that started in an earlier range; empty after a line end
            while file.tell() < part.stop:
                line = file.readline()
                if not line:
                    return
                yield line.removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise DataError(f"cannot read {part.path}: {error.strerror}") from error


def decode(content: bytes, skipped: Counter[str]) -> str | None:
    """The text of UTF-8 bytes (a byte-order mark is dropped), or None, counted, when it is none or only blank."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        skipped[NOT_UTF8] += 1
        return None
    if not text.strip():
        skipped[EMPTY] += 1
        return None
    return text


def text_of_json(line: str, key: str, skipped: Counter[str]) -> str | None:
    """The string under `key` of a JSON object, or None, counted under its reason."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        skipped[BROKEN_JSON] += 1
        return None
    text = record.get(key) if isinstance(record, dict) else None
    return checked_text(text, skipped)


def checked_text(text: object, skipped: Counter[str]) -> str | None:
    """`text` when it is a string that can be encoded as UTF-8 and is not blank, else None, counted."""
    if not isinstance(text, str):
        skipped[NO_TEXT] += 1
        return None
    try:
        text.encode("utf-8")  # JSON can spell half a surrogate pair, which is no character
    except UnicodeEncodeError:
        skipped[NOT_UTF8] += 1
        return None
    if not text.strip():
        skipped[EMPTY] += 1
        return None
    return text


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk in sorted order, without hidden names; a folder that cannot be listed is an error."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot list {error.filename}: {error.strerror}") from error

    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield here, folders, [name for name in names if not name.startswith(".")]
