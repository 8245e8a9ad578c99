from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from titan5d.schedules import catalog, cli
from titan5d.schedules.csv import read_csv


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(list(words)))


def test_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run("--name", "1F1B,ZBVZeroBubble", "--stages", "4", "--microbatches", "8") == 0
    out = capsys.readouterr().out
    assert "rank 3  ......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--............" in out
    assert "1F1B           4       33        27.3%   9 each        4 3 2 1        0 each" in out
    assert "ZBVZeroBubble  8       25.5      5.9%    1.5 each      4 each         1 3 5 7" in out


def test_json_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, picture = tmp_path / "o.html", tmp_path / "o.svg"
    words = ["--name", "all", "--stages", "4", "--microbatches", "8", "--json"]
    assert run(*words, "--html", str(page), "--svg", str(picture)) == 0
    found = json.loads(capsys.readouterr().out)["schedules"]
    assert [one["name"] for one in found] == list(catalog.NAMES)
    one = found[1]
    assert one["ranks"] == 4 and one["stages"] == 4 and one["microbatches"] == 8
    assert one["bubble_fraction"] == pytest.approx(3 / 11)
    assert one["makespan"] == 33 and one["idle"] == [9, 9, 9, 9] and one["peak_activations"] == [4, 3, 2, 1]
    assert one["actions"][3][:2] == [["3F0", 3, 4], ["3B0", 4, 6]]
    assert page.read_text().count("</svg>") == 1
    assert all(name in picture.read_text() for name in catalog.NAMES)


def test_times_for_a_rank_are_shared_out_and_times_per_stage_are_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--stages", "2", "--microbatches", "1", "--json"]
    assert run("--name", "GPipe,LoopedBFS", *words, "--f", "4", "--b", "2", "--w", "2", "--comm", "1") == 0
    gpipe, looped = json.loads(capsys.readouterr().out)["schedules"]
    assert gpipe["makespan"] == 4 + 1 + 4 + 4 + 1 + 4
    assert looped["makespan"] == 4 * 2 + 4 * 2 + 6 * 1
    assert run("--name", "GPipe", *words, "--f", "1,5", "--b", "0", "--w", "0") == 0
    assert json.loads(capsys.readouterr().out)["schedules"][0]["makespan"] == 6


def test_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--name", "DualPipeV", "--stages", "4", "--microbatches", "20", "--json"]
    assert run(*words) == 0
    apart = json.loads(capsys.readouterr().out)["schedules"][0]["makespan"]
    assert run(*words, "--overlap", "1") == 0
    assert json.loads(capsys.readouterr().out)["schedules"][0]["makespan"] < apart


def test_chunks_are_for_those_that_leave_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--stages", "2", "--microbatches", "4", "--chunks", "3"]
    assert run("--name", "1F1B,Interleaved1F1B,ZBVZeroBubble", *words, "--json") == 0
    assert [one["stages"] for one in json.loads(capsys.readouterr().out)["schedules"]] == [2, 6, 4]
    assert run("--name", "1F1B", *words) == 2
    assert "1F1B puts 1 chunk on a rank, got 3; Interleaved1F1B" in capsys.readouterr().err


def test_csv_in_and_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "t.csv")
    assert run("--name", "DualPipeV", "--stages", "2", "--microbatches", "5", "--write-csv", path) == 0
    assert read_csv(path, name="DualPipeV") == catalog.build("DualPipeV", 2, 2, 5)
    capsys.readouterr()
    assert run("--csv", path, "--json") == 0
    [found] = json.loads(capsys.readouterr().out)["schedules"]
    assert found["name"] == "t.csv" and found["microbatches"] == 5
    assert run("--csv", path, "--stages", "3") == 2
    assert "--stages is 3, but" in capsys.readouterr().err
    assert run("--csv", path, "--microbatches", "6") == 2
    assert "lacks 0F5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ([], ["--name or --csv is needed; --name takes GPipe, 1F1B"]),
        (["--name", "1F1B"], ["--name needs --stages (ranks in the pipeline) and --microbatches as well"]),
        (
            ["--name", "Foo,1F1B", "--stages", "4", "--microbatches", "0", "--f", "x", "--w", "-1"],
            [
                "schedule 'Foo' is not known; there are GPipe",
                "1F1B with 0 micro-batches: at least 1 is needed, and 4 or more to keep 4 ranks busy",
                "--f is 'x': write a number",
                "--w is '-1': times are finite and at least 0",
            ],
        ),
        (
            ["--name", "1F1B", "--stages", "2", "--microbatches", "2", "--b", "1,2,3"],
            ["--b has 3 times: give 1, or one for each of the 2 stages of 1F1B"],
        ),
        (
            ["--name", "1F1B", "--stages", "2", "--microbatches", "2", "--comm", "-1", "--overlap", "nan"],
            [
                "--comm is -1.0: a time is finite and at least 0",
                "--overlap is nan: it is a fraction from 0 to 1",
            ],
        ),
        (
            ["--name", "1F1B,GPipe", "--stages", "2", "--microbatches", "2", "--write-csv", "x.csv"],
            ["--write-csv writes one schedule, and 2 are asked for"],
        ),
        (
            ["--name", "1F1B", "--stages", "10000", "--microbatches", "10000"],
            ["1F1B would have up to 300,000,000 actions: at most 2,000,000 can be drawn"],
        ),
        (["--csv", "/nowhere/x.csv"], ["/nowhere/x.csv: No such file or directory"]),
        (
            ["--name", "1F1B", "--stages", "2", "--microbatches", "2", "--svg", "/nowhere/x.svg"],
            ["/nowhere/x.svg: No such file or directory"],
        ),
    ],
)
def test_refused_with_status_2_all_problems_at_once(
    words: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    found = captured.err.splitlines()
    assert len(found) == len(lines)
    for line, wanted in zip(found, lines, strict=True):
        assert line.startswith(f"titan5d schedule: {wanted}")
