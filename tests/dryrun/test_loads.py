"""Assumed loads: no row is lost, and the fullest rank gets what was asked for."""

from __future__ import annotations

import pytest

from titan5d.dryrun.loads import AssumedLoads, assumed_counts


@pytest.mark.parametrize("rows", [64, 61, 3, 0])
@pytest.mark.parametrize("imbalance", [1.0, 1.5, 4.0])
def test_every_row_goes_somewhere(rows: int, imbalance: float) -> None:
    leaving, arriving = assumed_counts(rows, 4, imbalance)
    assert sum(leaving) == rows and len(leaving) == len(arriving) == 4
    assert min(leaving) >= 0
    assert arriving == [min(rows, round(rows / 4 * imbalance))] * 4


def test_the_own_share_stands_at_the_own_place() -> None:
    assert AssumedLoads(2, 4, 2.0)(None, 16) == [[3, 3, 8, 2], [8, 8, 8, 8]]
    assert AssumedLoads(0, 1, 1.0)(None, 7) == [[7], [7]]


def test_every_slice_of_an_expert_gets_its_rows() -> None:
    assert AssumedLoads(1, 2, 1.0, slices=2)(None, 7) == [[3, 4, 3, 4], [4, 4, 4, 4]]
