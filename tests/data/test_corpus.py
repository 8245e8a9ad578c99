"""Documents from files: all of them, in order, whatever the cut into pieces; bad records counted by reason."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan5d.data.corpus import FileRange, LineFiles, Piece, Source, TextFiles, find_files, lines_of
from titan5d.data.errors import DataError


def read_all(source: Source, piece_bytes: int) -> tuple[list[str], Counter[str]]:
    pieces, skipped = source.plan(piece_bytes)
    return [text for piece in pieces for text in source.documents(piece, skipped)], skipped


@given(st.lists(st.text("ab\r ", max_size=9)), st.integers(1, 12), st.booleans())
def test_lines_are_found_once_wherever_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], step: int, ends_with_newline: bool
) -> None:
    content = "\n".join(lines) + ("\n" if ends_with_newline else "")
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(content.encode())
    cuts = [*range(0, len(content), step), len(content)]
    ranges = [FileRange(str(path), start, stop, stop - start) for start, stop in pairwise(cuts)]
    expected = content.split("\n")
    if expected[-1] == "":
        expected.pop()  # what follows the last line end is no line
    assert [line for part in ranges for line in lines_of(part)] == [
        line.removesuffix("\r").encode() for line in expected
    ]


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_bad_lines_are_counted_and_the_rest_is_read(tmp_path: Path, piece_bytes: int) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("one\n\n   \r\ntwo é\r\n".encode() + b"\xff\xfe bad\n" + "\ufeffthree\nlast".encode())
    documents, skipped = read_all(LineFiles([file], "a"), piece_bytes)
    assert documents == ["one", "two é", "three", "last"]
    assert skipped == {"empty": 2, "invalid UTF-8": 1}


def test_jsonl_reads_its_key_and_counts_what_is_none(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    records = [
        '{"body": "one\\ntwo"}',
        "{broken",
        '{"text": "other key"}',
        '{"body": 3}',
        "[1]",
        '{"body": "  "}',
    ]
    records += ['{"body": "\\ud800"}', "", '{"body": "last"}', "[" * 100_000]
    file.write_text("\n".join(records))
    documents, skipped = read_all(LineFiles([file], "a", json_key="body"), 50)
    assert documents == ["one\ntwo", "last"]
    assert skipped == {"broken JSON": 2, "no text under the key": 3, "empty": 2, "invalid UTF-8": 1}


@pytest.mark.parametrize("piece_bytes", [1, 8, 1000])
def test_a_folder_gives_a_document_a_file_in_sorted_order(tmp_path: Path, piece_bytes: int) -> None:
    for name, content in {
        "b.txt": b"bb",
        "a/z.txt": b"az",
        "a/a.md": b"aa",
        ".hidden": b"no",
        "c": b"\xff",
        "d": b" ",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    files = find_files(str(tmp_path))
    documents, skipped = read_all(TextFiles(files, "x"), piece_bytes)
    assert documents == ["bb", "aa", "az"]  # files of a folder before its sub-folders
    assert skipped == {"invalid UTF-8": 1, "empty": 1}


def test_small_files_share_pieces_and_large_ones_are_cut(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("12345678\n" * (1 if i else 100))
    pieces, _ = LineFiles(find_files(str(tmp_path)), "x").plan(300)
    assert [piece.n_bytes for piece in pieces] == [300, 300, 300, 81]
    assert len(pieces[-1].ranges) == 9


def test_find_files_takes_file_folder_and_glob(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        (tmp_path / name).write_text("x")

    def names(path: str, *suffixes: str) -> list[str]:
        return [file.name for file in find_files(path, suffixes)]

    assert names(str(tmp_path / "c.txt")) == ["c.txt"]
    assert names(str(tmp_path), ".jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/*.jsonl") == ["a.jsonl", "b.jsonl"]
    with pytest.raises(
        DataError, match=r"nowhere' does not exist: dataset_path is a file, a folder or a glob"
    ):
        find_files(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"no file matches .*\*\.csv"):
        find_files(f"{tmp_path}/*.csv")
    with pytest.raises(DataError, match=r"holds no \.parquet file"):
        find_files(str(tmp_path), (".parquet",))
    with pytest.raises(DataError, match="needs dataset_path"):
        find_files(None)


def test_unreadable_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "gone.txt"
    piece = Piece((FileRange(str(file), 0, 5, 5),))
    for source in (LineFiles([], "x"), TextFiles([], "x")):
        with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
            list(source.documents(piece, Counter()))
    (tmp_path / "link.txt").symlink_to(file)
    with pytest.raises(DataError, match=r"cannot read .*link\.txt: No such file"):
        TextFiles([tmp_path / "link.txt"], "x")


def test_fingerprint_changes_with_files_and_settings_only(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "one"}))
    before = LineFiles([file], "x", "text").fingerprint()
    assert LineFiles([file], "named differently", "text").fingerprint() == before
    assert LineFiles([file], "x", "body").fingerprint() != before
    assert LineFiles([file], "x").fingerprint() != before
    file.write_text(json.dumps({"text": "more"}))
    assert LineFiles([file], "x", "text").fingerprint() != before
