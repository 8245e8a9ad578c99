"""docs/composition.md belongs to this version: rows, columns, refusals, reasons; only its numbers come from runs."""

from __future__ import annotations

from pathlib import Path

from titan5d.verify.composition import page, without_numbers

DOCUMENT = Path(__file__).parents[2] / "docs" / "composition.md"


def test_the_page_is_not_stale() -> None:
    expected = page(lambda small: lambda cuts: "=")
    assert without_numbers(DOCUMENT.read_text(encoding="utf-8")) == expected, (
        "docs/composition.md is of another version, or a cell is no number;"
        " make it anew: titan5d verify --composition docs/composition.md"
    )
    assert expected.count("refused (") > 5 and expected.count("=") > 100
