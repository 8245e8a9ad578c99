"""`titan5d data`: build, build again, info, verify, and refusals with status 2."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.data.corpora import marked_documents
from titan5d.data import cli
from titan5d.data.cli import add_arguments, run


def data(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="titan5d data")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text("\n".join(marked_documents(20, 30)))
    return str(tmp_path / "corpus.txt")


def test_build_then_info(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "shards")
    arguments = [
        "build",
        "--dataset",
        "text",
        "--path",
        corpus,
        "--tokenizer",
        "bytes",
        "--out",
        out,
        "--workers",
        "1",
    ]
    assert data(*arguments) == 0
    assert "20 documents, 640 tokens, skipped: none" in capsys.readouterr().out
    assert data(*arguments) == 0  # there already
    capsys.readouterr()
    assert data("info", out, "--verify") == 0
    printed = capsys.readouterr().out
    assert "640 tokens" in printed and "checksums right" in printed and "BOS 256, EOS 257" in printed
    assert data("info", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "/nowhere"], "no such folder"),
        (
            ["build", "--dataset", "text", "--path", "/nowhere", "--tokenizer", "bytes", "--out", "x"],
            "does not exist",
        ),
        (["build", "--dataset", "text", "--tokenizer", "bytes", "--out", "x"], "needs dataset_path"),
    ],
)
def test_refusals_have_status_2_and_a_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_ctrl_c_says_that_finished_shards_are_kept(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_shards", stopped)
    assert (
        data("build", "--dataset", "text", "--path", corpus, "--tokenizer", "bytes", "--out", str(tmp_path))
        == 1
    )
    assert "the same command goes on from there" in capsys.readouterr().err


def test_unknown_tokenizer_is_refused(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        data(
            "build",
            "--dataset",
            "text",
            "--path",
            corpus,
            "--tokenizer",
            "gone",
            "--out",
            str(tmp_path / "x"),
        )
        == 2
    )
    assert "no tokenizer at 'gone'" in capsys.readouterr().err
