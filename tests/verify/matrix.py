"""One reference for many layouts: what the tests of the matrix share."""

from __future__ import annotations

from functools import cache

from titan5d.config.load import load_config
from titan5d.verify.compare import Outcome
from titan5d.verify.layouts import parse_layouts
from titan5d.verify.run import Row, run_layout, run_reference
from titan5d.verify.shrink import Small, shrink

LIMIT = 110.0


@cache
def case(words: tuple[str, ...], layouts: str) -> tuple[Small, Outcome]:
    """The small case of a config for these layouts, and what one process does with it."""
    small = shrink(load_config(words), parse_layouts(layouts))
    return small, run_reference(small, LIMIT)


def assert_equal(words: tuple[str, ...], layouts: str, layout: str) -> Row:
    """One of the layouts trains the model of one process, in every check."""
    small, expected = case(words, layouts)
    row = run_layout(small, parse_layouts(layout)[0], expected, LIMIT)
    assert row.status == "equal", (row.message, [check for check in row.checks.values() if not check.ok])
    return row
