"""pysrc: a fixed choice of files, deduplicated, one percent held out, the same wherever Python lives."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from titan5d.data.errors import DataError
from titan5d.data.pysrc import PythonSources, installed_roots, split_of

BODY = "# a module that is long enough to count as a document of the corpus, number {}\n"


def fake_site(folder: Path, n: int = 300) -> list[tuple[str, Path]]:
    """Two packages with n modules each, and files that must not be taken."""
    for package in ("one", "two"):
        for i in range(n):
            file = folder / package / f"part{i % 3}" / f"m{i}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(BODY.format(f"{package} {i}"))
    (folder / "one" / "part0" / "tests").mkdir()
    (folder / "one" / "part0" / "tests" / "t.py").write_text(BODY.format("a test"))
    (folder / "one" / "tiny.py").write_text("x = 1\n")
    (folder / "one" / "huge.py").write_text(BODY.format("huge") * 4000)
    (folder / "one" / "data.txt").write_text(BODY.format("no Python"))
    (folder / "two" / "copy.py").write_text(BODY.format("one 0"))
    return [("one", folder / "one"), ("two", folder / "two")]


def documents_of(source: PythonSources) -> tuple[list[str], Counter[str]]:
    pieces, skipped = source.plan(1000)
    return [text for piece in pieces for text in source.documents(piece, skipped)], skipped


def test_both_parts_together_are_every_document_once(tmp_path: Path) -> None:
    roots = fake_site(tmp_path)
    train, skipped = documents_of(PythonSources("train", roots))
    held_out, more_skipped = documents_of(PythonSources("validation", roots))
    expected = {BODY.format(f"{package} {i}") for package in ("one", "two") for i in range(300)}
    assert len(train) + len(held_out) == 600
    assert set(train) | set(held_out) == expected
    assert 1 <= len(held_out) <= 20  # one percent of 600
    assert skipped + more_skipped == {"duplicate": 1}


def test_order_and_split_do_not_depend_on_where_python_lives(tmp_path: Path) -> None:
    here = documents_of(PythonSources("train", fake_site(tmp_path / "here")))
    there = documents_of(PythonSources("train", list(reversed(fake_site(tmp_path / "else" / "where")))))
    assert here == there
    assert split_of("one/part0/m3.py") == split_of("one/part0/m3.py")


def test_fingerprint_sees_changed_files_and_the_part(tmp_path: Path) -> None:
    roots = fake_site(tmp_path)
    before = PythonSources("train", roots).fingerprint()
    assert before == PythonSources("train", roots).fingerprint()
    assert before != PythonSources("validation", roots).fingerprint()
    (tmp_path / "two" / "new.py").write_text(BODY.format("new"))
    assert before != PythonSources("train", roots).fingerprint()


def test_installed_sources_are_found_in_under_a_second_of_work() -> None:
    assert [name for name, _ in installed_roots()] == ["python", "networkx", "sympy", "torch"]
    start = time.process_time()
    source = PythonSources("train")
    source.fingerprint()
    assert time.process_time() - start < 1.0
    assert source.total_bytes() > 50e6
    held_out = PythonSources("validation").total_bytes()
    assert 0.002 < held_out / source.total_bytes() < 0.03


def test_no_source_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no Python source file"):
        PythonSources("train", [("empty", tmp_path / "empty")])
