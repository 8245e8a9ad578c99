"""`pysrc`: the Python sources installed beside the package, the data set every machine has.

The standard library and the packages torch brings along (sympy, networkx) and torch itself: about 3,900
documents, 67 MB, permissively licensed. One file is one document. The same installed versions give the same
documents in the same order; sha1(path) % 100 < 1 holds one percent out for validation.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from titan5d.data.corpus import DUPLICATE, FileRange, Piece, group, whole_files
from titan5d.data.errors import DataError

PACKAGES = ("networkx", "sympy", "torch")
MIN_BYTES, MAX_BYTES = 64, 200_000  # stubs and generated tables teach nothing
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SKIPPED_FILES = {"torch/version.py"}  # differs between builds of one version
SKIPPED_PREFIX = "_sysconfigdata"  # the standard library's record of the machine it was built on

Split = Literal["train", "validation"]


class PythonSources:
    """The documents of `pysrc`, train or validation part.

    `roots` are (name, folder) pairs; names stand for folders in the hold-out rule, so that it does not depend
    on where Python lives. Default: what is installed.
    """

    def __init__(self, split: Split, roots: list[tuple[str, Path]] | None = None) -> None:
        self._split = split
        self._files = sorted(file for name, root in roots or installed_roots() for file in _list(name, root))
        if not self._files:
            raise DataError("pysrc: no Python source file is installed; use another data set")
        names = ", ".join(sorted({file[0].split("/")[0] for file in self._files}))
        self.description = f"Python sources of {names} ({split} part)"

    def fingerprint(self) -> str:
        listed = [(name, size, time) for name, _, size, time in self._files]
        return hashlib.sha256(repr(("pysrc", self._split, listed)).encode()).hexdigest()[:16]

    def total_bytes(self) -> int:
        return sum(size for name, _, size, _ in self._files if split_of(name) == self._split)

    def plan(self, piece_bytes: int) -> tuple[list[Piece], Counter[str]]:
        """Reads everything once: of files with equal contents only the first counts, in both parts together."""
        seen: set[bytes] = set()
        ranges = []
        skipped: Counter[str] = Counter()
        for name, path, size, _ in self._files:
            try:
                digest = hashlib.sha1(Path(path).read_bytes(), usedforsecurity=False).digest()
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from error
            duplicate = digest in seen
            seen.add(digest)
            if split_of(name) != self._split:
                continue
            if duplicate:
                skipped[DUPLICATE] += 1
            else:
                ranges.append(FileRange(path, 0, size, size))
        return group(ranges, piece_bytes), skipped

    def documents(self, piece: Piece, skipped: Counter[str]) -> Iterator[str]:
        return whole_files(piece, skipped)


def split_of(name: str) -> Split:
    """The part a file belongs to, by its name alone."""
    digest = int(hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest(), 16)
    return "validation" if digest % 100 < 1 else "train"


def installed_roots() -> list[tuple[str, Path]]:
    """The standard library and those of PACKAGES that are installed; none of them is imported."""
    roots = [("python", Path(sysconfig.get_paths()["stdlib"]))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            roots.append((package, Path(spec.submodule_search_locations[0])))
    return roots


def _list(package: str, root: Path) -> Iterator[tuple[str, str, int, int]]:
    """(name, path, bytes, time of change) of the files taken from one root."""
    stack = [(package, str(root))]
    while stack:
        prefix, folder = stack.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            raise DataError(f"pysrc: cannot list {folder}: {error.strerror}") from error
        for entry in entries:
            name = f"{prefix}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in SKIPPED_FOLDERS:
                    stack.append((name, entry.path))
            elif entry.name.endswith(".py") and not (
                name in SKIPPED_FILES or entry.name.startswith(SKIPPED_PREFIX)
            ):
                stat = entry.stat()
                if MIN_BYTES <= stat.st_size <= MAX_BYTES:
                    yield name, entry.path, stat.st_size, stat.st_mtime_ns
