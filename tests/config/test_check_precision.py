"""Filters of low precision that fit nothing are refused (case 076)."""

from __future__ import annotations

import pytest

from titan5d.config.check_precision import FLOAT8, MX, filter_problems
from titan5d.config.schema import Config
from titan5d.models.families import FAMILIES

NAMES = FAMILIES["llama3"].hf_name_map(FAMILIES["llama3"].FLAVORS["debug"])


def config(kind: str, *filters: str) -> Config:
    made = Config()
    made.model.converters = [kind]
    linear = made.quantize.linear
    (linear.float8 if kind == FLOAT8 else linear.mx).filter_fqns = list(filters)
    return made


@pytest.mark.parametrize("kind", [FLOAT8, MX])
def test_a_filter_that_fits_nothing(kind: str):
    assert filter_problems(config(kind, "output", "attention.wk", "layers.0."), NAMES) == []
    (problem,) = filter_problems(config(kind, "wq", "atention"), NAMES)
    assert kind in problem
    assert "'atention'" in problem
    assert "did you mean 'attention'?" in problem


def test_filters_of_what_is_off_are_not_asked():
    made = config(FLOAT8, "atention")
    made.model.converters = []
    assert filter_problems(made, NAMES) == []
