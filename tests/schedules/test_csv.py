from __future__ import annotations

from pathlib import Path

import pytest

from titan5d.schedules import catalog
from titan5d.schedules.csv import read_csv, write_csv
from titan5d.schedules.table import Action, Kind, Overlap, Schedule, ScheduleError, Slot


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


def refused(tmp_path: Path, text: str, microbatches: int | None = None) -> list[str]:
    path = written(tmp_path, text)
    with pytest.raises(ScheduleError) as error:
        read_csv(path, microbatches)
    assert all(problem.startswith(f"{path}: ") for problem in error.value.problems)
    return [problem.removeprefix(f"{path}: ") for problem in error.value.problems]


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (3, 7), (4, 3), (4, 9)])
def test_round_trip(name: str, p: int, m: int, tmp_path: Path) -> None:
    schedule = catalog.build(name, p, catalog.default_chunks(name), m)
    write_csv(schedule, tmp_path / "a.csv")
    assert read_csv(tmp_path / "a.csv", m, name) == schedule


def test_as_torch_writes_it(tmp_path: Path) -> None:
    text = "0F0,0F1,,0B0,(0F2;0B1)OVERLAP_F_B,,0B2\r\n,1F0,1F1,1B0,1B1,1F2,1I2,1W2\r\n"
    schedule = read_csv(written(tmp_path, text))
    first: tuple[Slot, ...] = (
        Action(0, "F", 0),
        Action(0, "F", 1),
        Action(0, "B", 0),
        Overlap(Action(0, "F", 2), Action(0, "B", 1)),
        Action(0, "B", 2),
    )
    kinds: tuple[Kind, ...] = ("F", "F", "B", "B", "F", "I", "W")
    microbatches = (0, 1, 0, 1, 2, 2, 2)
    second = tuple(Action(1, kind, mb) for kind, mb in zip(kinds, microbatches, strict=True))
    rows = (first, second)
    assert schedule == Schedule("table.csv", 3, (0, 1), rows)
    # Spaces, blank lines at the end and the order inside a pair make no difference.
    text = " 0F0 ,0F1,,0B0,( 0B1 ; 0F2 )OVERLAP_F_B,,0B2\n,1F0,1F1,1B0,1B1,1F2,1I2,1W2\n\n,,\n"
    assert read_csv(written(tmp_path, text)) == schedule


def test_cells_that_are_no_actions(tmp_path: Path) -> None:
    found = refused(tmp_path, "0F0,0Q1,0SEND_F0\n1F0,(1B0,F1")
    how = "is no action: write stage, kind and micro-batch like 2F0, with kind F, B, I or W, or "
    how += "(0F4;7B1)OVERLAP_F_B"
    assert found == [
        f"rank 0 (line 1), cell 2: '0Q1' {how}",
        "rank 0 (line 1), cell 3: '0SEND_F0' is no compute action: this reads compute-only tables (F, B, I, "
        "W, OVERLAP_F_B), from which messages and FSDP actions are worked out",
        f"rank 1 (line 2), cell 2: '(1B0' {how}",
        f"rank 1 (line 2), cell 3: 'F1' {how}",
    ]


def test_missing_double_and_wrong_order(tmp_path: Path) -> None:
    assert refused(tmp_path, "0F0,0F1,0B0,0B0\n,1B0,1F0,1F1,1B1") == [
        "0B0 is there 2 times on rank 0: once is right",
        "stage 0 (rank 0) lacks 0B1 (backward: B, or I and W)",
        "rank 1 has 1B0 (action 1 of its row) before 1F0 (action 2): the forward comes first",
    ]


def test_a_given_number_of_micro_batches_is_asked_for(tmp_path: Path) -> None:
    assert refused(tmp_path, "0F0,0B0", microbatches=2) == [
        "stage 0 (rank 0) lacks 0F1 (forward)",
        "stage 0 (rank 0) lacks 0B1 (backward: B, or I and W)",
    ]
    assert refused(tmp_path, "0F0,0B0,0F1,0B1", microbatches=1) == [
        "rank 0 has 0F1, but the micro-batches are 0 to 0: there is no micro-batch 1",
        "rank 0 has 0B1, but the micro-batches are 0 to 0: there is no micro-batch 1",
    ]


def test_deadlock(tmp_path: Path) -> None:
    found = refused(tmp_path, "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    assert [line[:29] for line in found] == ["rank 0 can never start 0B0 (a", "rank 1 can never start 1F1 (a"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the table is empty"),
        ("\n,,\n", "the table is empty"),
        ("0F0,0B0\n\n1F0,1B0", "rank 1 (line 2) is empty"),
        ("0F0,0B0\n0F1,0B1", "stage 0 is on rank 0 and rank 1: a stage is on one rank"),
        ("0F0,0B0\n999999F0", "no rank has actions of stage 1, 2, 3, 4, 5, 6 and 999992 more"),
        ("0F0,0B0,0F3,0B3", "the highest micro-batch is 3, but no rank has actions of micro-batch 1, 2"),
        ("0F0,0B0,0F999999", "no rank has actions of micro-batch 1, 2, 3, 4, 5, 6 and 999992 more"),
        ('0F0,"0B0', "not a CSV table"),
        ("0F0,0F1,(0B0;0B1)OVERLAP_F_B", "holds one F and one B (or I)"),
        ("0F0,1234567F0", "'1234567F0' is no action"),
    ],
)
def test_other_tables_that_are_none(text: str, words: str, tmp_path: Path) -> None:
    assert any(words in line for line in refused(tmp_path, text))


def test_no_text_file(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"\x7fELF\xff\xfe")
    with pytest.raises(ScheduleError, match="not a text file"):
        read_csv(tmp_path / "x.csv")
    with pytest.raises(FileNotFoundError):
        read_csv(tmp_path / "none.csv")


def test_long_lists_of_problems_are_cut(tmp_path: Path) -> None:
    found = refused(tmp_path, ",".join(["?"] * 50))
    assert len(found) == 21
    assert found[-1] == "... and 30 more"
