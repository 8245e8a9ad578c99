"""Building shards: the same bytes for any number of workers, resumable after any stop, and never half."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from tests.data.breaking import BreakingLines, MeasuredFiles
from tests.data.corpora import marked_documents, quiet, shards_of
from titan5d.data import build as build_module
from titan5d.data import encode as encode_module
from titan5d.data.build import build_shards
from titan5d.data.corpus import LineFiles
from titan5d.data.encode import token_dtype
from titan5d.data.errors import DataError
from titan5d.data.tokenizer import ByteTokenizer, load_tokenizer
from titan5d.data.workers import encode_pieces


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def line_source(folder: Path, documents: list[str]) -> LineFiles:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "corpus.txt"
    file.write_text("\n".join(documents))
    return LineFiles([file], "corpus.txt")


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    documents = [f"{text} naïve" for text in marked_documents(4000, 400)]  # 1.6 MB: worth real workers
    source = line_source(tmp_path, documents)
    tokenizer = load_tokenizer("bpe4k")
    folders = []
    for workers in (1, 2, 3):
        folders.append(tmp_path / f"workers-{workers}")
        build_shards(source, tokenizer, folders[-1], workers=workers, piece_bytes=300_000, log=quiet)
    first = contents(folders[0])
    assert len(first) == 1 + 2 * 6
    assert contents(folders[1]) == first and contents(folders[2]) == first
    assert multiprocessing.active_children() == []


def test_meta_tells_counts_tokenizer_and_skipped(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, ["one", "", "two\x00", "  ", "three"])
    assert sorted(path.name for path in shards.folder.iterdir()) == [
        "meta.json",
        "shard-00000.bin",
        "shard-00000.idx",
    ]
    meta = json.loads((shards.folder / "meta.json").read_text())
    assert meta["documents"] == 3 and meta["tokens"] == 3 + 4 + 5 + 2 * 3
    assert meta["skipped"] == {"empty": 2}
    assert (
        meta["tokenizer"]["fingerprint"] == ByteTokenizer.fingerprint and meta["tokenizer"]["eos_id"] == 257
    )
    assert meta["dtype"] == "<u2" and meta["max_token_id"] == 257


def test_small_ids_take_two_bytes_large_ones_four() -> None:
    assert token_dtype(1 << 16).itemsize == 2
    assert token_dtype((1 << 16) + 1).itemsize == 4


def test_stopped_build_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = marked_documents(50, 20)
    source = line_source(tmp_path, documents)
    whole = build_shards(source, ByteTokenizer(), tmp_path / "whole", piece_bytes=100, log=quiet)
    out = tmp_path / "out"
    real = encode_module.encode_piece
    done: list[int] = []

    def stops_at_piece_4(job, index, piece):  # type: ignore[no-untyped-def]
        if index == 4 and len(done) < 5:
            raise KeyboardInterrupt
        done.append(index)
        return real(job, index, piece)

    monkeypatch.setattr(build_module, "encode_piece", stops_at_piece_4)
    with pytest.raises(KeyboardInterrupt):
        build_shards(source, ByteTokenizer(), out, piece_bytes=100, log=quiet)
    assert done == [0, 1, 2, 3] and not (out / "meta.json").exists()

    (out / "shard-00002.bin").write_bytes(b"torn")  # a shard without its bytes counts as missing
    done.clear()
    done += [-1] * 5
    lines: list[str] = []
    build_shards(source, ByteTokenizer(), out, piece_bytes=100, log=lines.append)
    assert done[5:] == [2, *range(4, 11)]
    assert any("3 of 11 shards are there already" in line for line in lines)
    assert contents(out) == contents(whole.folder)


def test_finished_build_is_opened_and_other_tokens_are_refused(tmp_path: Path) -> None:
    source = line_source(tmp_path, ["one", "two"])
    out = tmp_path / "out"
    first = build_shards(source, ByteTokenizer(), out, log=quiet)
    times = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert build_shards(source, ByteTokenizer(), out, log=quiet).fingerprint == first.fingerprint
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == times
    with pytest.raises(
        DataError, match=r"already holds token shards of another tokenizer .*tokenizer bytes\)"
    ):
        build_shards(source, load_tokenizer("bpe4k"), out, log=quiet)
    with pytest.raises(DataError, match="already holds token shards of another source"):
        build_shards(line_source(tmp_path / "b", ["other"]), ByteTokenizer(), out, log=quiet)


def test_unfinished_build_of_other_documents_is_started_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "plan.json").write_text('{"source": "another"}')
    (out / "shard-00000.json").write_text(
        '{"name": "shard-00000", "tokens": 0, "documents": 0, "skipped": {}}'
    )
    shards = build_shards(line_source(tmp_path, ["one"]), ByteTokenizer(), out, log=quiet)
    assert shards.n_documents == 1


def test_pieces_without_a_document_leave_no_shard(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, ["x" * 1000, "y"], piece_bytes=10)  # most pieces lie inside the first line
    assert len(shards.meta["shards"]) == 2
    assert len(list(shards.folder.glob("shard-*"))) == 4


def test_source_without_a_document_is_refused_with_the_reasons(tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(b"\n \n\xff\n")
    with pytest.raises(
        DataError, match=r"no document in bad\.txt \(a document a line\): 2 empty, 1 invalid UTF-8"
    ):
        build_shards(LineFiles([file], "bad.txt"), ByteTokenizer(), tmp_path / "out", log=quiet)
    with pytest.raises(DataError, match="the files are empty"):
        shards_of(tmp_path, [])


def test_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    class Growing(LineFiles):
        def fingerprint(self) -> str:
            self.calls = getattr(self, "calls", 0) + 1
            return str(self.calls)

    file = tmp_path / "a.txt"
    file.write_text("one\n")
    with pytest.raises(DataError, match="changed while they were tokenized"):
        build_shards(Growing([file], "a.txt"), ByteTokenizer(), tmp_path / "out", log=quiet)
    assert not (tmp_path / "out" / "meta.json").exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("data", "line 7 is odd"),
        ("disk", r"writing to .*out failed: .*No space left"),
        ("killed", r"exit status -9 .*try fewer workers"),
    ],
)
def test_failure_in_a_worker_ends_the_build_with_its_reason(tmp_path: Path, how: str, message: str) -> None:
    file = tmp_path / "a.txt"
    fine = "fine " * 40 + "\n"
    file.write_text(fine * 4000 + "break\n" + fine * 4000)  # 1.6 MB: worth real workers
    out = tmp_path / "out"
    start = time.monotonic()
    with pytest.raises(DataError, match=message):
        build_shards(
            BreakingLines([file], how), ByteTokenizer(), out, workers=2, piece_bytes=500_000, log=quiet
        )
    assert time.monotonic() - start < 30
    assert multiprocessing.active_children() == []
    assert not (out / "meta.json").exists()
    assert all(re.fullmatch(r"plan\.json|shard-\d{5}\.\w+", file.name) for file in out.iterdir())


def test_disk_full_is_told_with_the_folder(tmp_path: Path) -> None:
    source = line_source(tmp_path, marked_documents(2000, 100))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(DataError, match=r"writing to .*out failed: .*File too large"):
            build_shards(source, ByteTokenizer(), tmp_path / "out", log=quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["plan.json"]


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"writing to .*file/out failed"):
        build_shards(line_source(tmp_path, ["one"]), ByteTokenizer(), tmp_path / "file" / "out", log=quiet)


@pytest.mark.parametrize("setting", [{"workers": 0}, {"piece_bytes": 0}])
def test_useless_settings_are_refused(tmp_path: Path, setting: dict[str, int]) -> None:
    with pytest.raises(DataError, match=f"{next(iter(setting))} = 0"):
        build_shards(line_source(tmp_path, ["one"]), ByteTokenizer(), tmp_path / "out", log=quiet, **setting)


@pytest.mark.parametrize("word", ["größer", "larger"])  # by the library, and by remembered words
def test_five_megabyte_line_needs_little_memory(tmp_path: Path, word: str) -> None:
    """Public case 036, last part: the library alone would take 600 MB for this line."""
    words = f"tokens {word} than a line: def f(x): return x + 1, "
    file = tmp_path / "long.txt"
    file.write_text((words * (5_000_000 // len(words) + 1))[:5_000_000], encoding="utf-8")
    source = MeasuredFiles([file], tmp_path / "report")
    shards = build_shards(source, load_tokenizer("bpe4k"), tmp_path / "out", workers=1, log=quiet)
    assert shards.n_documents == 1 and shards.n_tokens > 1_000_000
    assert int((tmp_path / "report").read_text()) < 300_000  # KiB


def test_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    """A worker whose parent is gone finds its pipe closed; nothing is left running."""
    source = line_source(tmp_path, marked_documents(200_000, 100))
    pieces, _ = source.plan(1 << 20)
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(read_end)
        os.set_inheritable(write_end, True)

        def tell(chars: int) -> None:
            os.write(
                write_end, json.dumps([child.pid for child in multiprocessing.active_children()]).encode()
            )
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            (tmp_path / "out").mkdir()
            job = encode_module.ShardJob(source, ByteTokenizer(), tmp_path / "out")
            encode_pieces(job, list(enumerate(pieces)), 2, tell)
        finally:
            os._exit(1)
    os.close(write_end)
    os.waitpid(parent, 0)
    workers = json.loads(os.read(read_end, 10_000))
    os.close(read_end)
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_runs(pid) for pid in workers)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
