"""The cache: one process builds, the others wait with a limit; a second start builds nothing."""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.corpora import marked_documents, quiet
from titan5d.data.cache import cached_shards
from titan5d.data.corpus import LineFiles, Piece
from titan5d.data.errors import DataError
from titan5d.data.tokenizer import ByteTokenizer, load_tokenizer
from titan5d.launch.local_ranks import run_ranks


class CountingLines(LineFiles):
    """Appends a line to `reads` whenever a piece is read."""

    def documents(self, piece: Piece, skipped: Counter[str]) -> Iterator[str]:
        with open(f"{piece.ranges[0].path}.reads", "a") as reads:
            reads.write(f"{os.getpid()}\n")
        time.sleep(0.2)
        yield from super().documents(piece, skipped)


def counting_source(folder: Path) -> CountingLines:
    file = folder / "corpus.txt"
    file.write_text("\n".join(marked_documents(50, 100)))
    return CountingLines([file], "corpus.txt")


def reads_of(folder: Path) -> list[str]:
    return (folder / "corpus.txt.reads").read_text().split()


def open_on_rank(source: LineFiles, cache: Path) -> tuple[str, int]:
    shards = cached_shards(source, ByteTokenizer(), cache, log=quiet)
    return shards.fingerprint, shards.n_tokens


def test_of_four_ranks_one_builds(tmp_path: Path) -> None:
    source = counting_source(tmp_path)
    results = run_ranks(open_on_rank, 4, source, tmp_path / "cache")
    assert len(set(results)) == 1 and results[0][1] == 50 * 102
    assert len(reads_of(tmp_path)) == 1


def test_second_start_builds_nothing_and_says_nothing(tmp_path: Path) -> None:
    source = counting_source(tmp_path)
    first = cached_shards(source, ByteTokenizer(), tmp_path / "cache", log=quiet)
    lines: list[str] = []
    again = cached_shards(source, ByteTokenizer(), tmp_path / "cache", log=lines.append)
    assert again.folder == first.folder and lines == [] and len(reads_of(tmp_path)) == 1


def test_other_tokenizer_or_changed_file_builds_anew(tmp_path: Path) -> None:
    source = counting_source(tmp_path)
    first = cached_shards(source, ByteTokenizer(), tmp_path / "cache", log=quiet)
    other = cached_shards(source, load_tokenizer("bpe4k"), tmp_path / "cache", log=quiet)
    (tmp_path / "corpus.txt").write_text("changed\n")
    changed = cached_shards(
        LineFiles([tmp_path / "corpus.txt"], "x"), ByteTokenizer(), tmp_path / "cache", log=quiet
    )
    assert len({first.folder, other.folder, changed.folder}) == 3
    assert changed.n_documents == 1


def test_waiting_for_a_builder_that_makes_nothing_ends(tmp_path: Path) -> None:
    source = counting_source(tmp_path)
    folder = cached_shards(source, ByteTokenizer(), tmp_path / "cache", log=quiet).folder
    (folder / "meta.json").unlink()
    holder = os.open(f"{folder}.lock", os.O_RDWR)  # another open file: flock treats it as another process
    fcntl.flock(holder, fcntl.LOCK_EX)
    lines: list[str] = []
    try:
        with pytest.raises(DataError, match=r"waited \d+ s for another process .*none in the last 0\.5 s"):
            cached_shards(source, ByteTokenizer(), tmp_path / "cache", log=lines.append, stall_limit_s=0.5)
    finally:
        os.close(holder)
    assert len(lines) == 1 and "another process tokenizes" in lines[0]
    assert (
        cached_shards(source, ByteTokenizer(), tmp_path / "cache", log=quiet).n_documents == 50
    )  # the lock is free


def test_cache_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"cannot write the data cache .*file/cache: .*training\.cache_folder"
    ):
        cached_shards(counting_source(tmp_path), ByteTokenizer(), tmp_path / "file" / "cache", log=quiet)
