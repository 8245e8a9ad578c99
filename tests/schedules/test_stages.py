"""Which parts form which stage: every part exactly once, in order, whatever the cut; misfits named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan5d.schedules.stages import (
    format_layout,
    from_names,
    layer_counts,
    model_parts,
    parse_layout,
    problems,
    split_by_weight,
    stages_of_size,
)


def flat(stages):
    return tuple(name for stage in stages for name in stage)


@settings(max_examples=100, deadline=None)
@given(
    n_layers=st.integers(1, 130),
    n_stages=st.integers(1, 40),
    first=st.integers(0, 5),
    last=st.integers(0, 5),
)
def test_every_part_is_in_one_stage_and_loads_are_even(n_layers, n_stages, first, last):
    stages = split_by_weight(n_layers, n_stages, first, last)
    assert flat(stages) == model_parts(n_layers)  # none dropped, none twice, in order
    loads = list(layer_counts(stages))
    loads[0] += first
    loads[-1] += last
    given_layers = [load for load, layers in zip(loads, layer_counts(stages), strict=True) if layers]
    assert max(given_layers) - min(loads) <= 1
    if all(stages):
        assert parse_layout(format_layout(stages)) == stages
    else:
        assert "empty" in problems(stages, n_layers)[0]


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "counts"),
    [
        (5, 2, (3, 2)),  # case 020
        (7, 4, (2, 2, 2, 1)),
        (30, 4, (7, 8, 8, 7)),
        (126, 16, (7, *[8] * 14, 7)),  # Llama-3 405B
        (2, 4, (0, 1, 1, 0)),  # embedding alone, head alone
    ],
)
def test_layers_that_do_not_divide(n_layers, n_stages, counts):
    stages = split_by_weight(n_layers, n_stages, first_less=1, last_less=1)
    assert layer_counts(stages) == counts
    assert problems(stages, n_layers) == []


def test_weights_move_layers():
    assert layer_counts(split_by_weight(8, 2, 0, 0)) == (4, 4)
    assert layer_counts(split_by_weight(8, 2, 0, 4)) == (6, 2)
    assert layer_counts(split_by_weight(8, 2, 4, 0)) == (2, 6)


def test_stages_of_size():
    assert stages_of_size(n_layers=6, layers_per_stage=4, first_less=1, last_less=1) == 2
    assert stages_of_size(n_layers=7, layers_per_stage=4, first_less=1, last_less=1) == 3


def test_a_layout_is_read_and_written():
    text = "E,t*3|t*4|t|t*2,N,H"
    stages = parse_layout(text)
    assert stages[0] == ("tok_embeddings", "layers.0", "layers.1", "layers.2")
    assert stages[3] == ("layers.8", "layers.9", "norm", "output")
    assert format_layout(stages) == text
    assert parse_layout(" E , t | t*1,t , N,H ") == parse_layout("E,t|t,t,N,H")


@pytest.mark.parametrize("text", ["E,x*3|N,H", "E t|N,H", "", "E,t**3|N,H", "E||N,H", "E,t*|N,H"])
def test_a_layout_that_cannot_be_read(text):
    with pytest.raises(ValueError, match=r"in stage \d is no part: write E"):
        parse_layout(text)


def test_names_are_sorted_within_a_stage():
    names = [["layers.1", "layers.0", "tok_embeddings"], ["output", "layers.2", "norm"]]
    assert flat(from_names(names, 3)) == model_parts(3)
    assert problems(from_names(names, 3), 3) == []


@pytest.mark.parametrize(
    ("text", "n_layers", "said"),
    [
        ("E,t*2|t*2,N,H", 5, "no stage holds layers.4"),
        ("E,t*3|t*3,N,H", 5, "layers.5 is not in the model"),
        ("E,t*2|t*3,N,N,H", 5, "norm is named more than once"),
        ("E,t*2|t*3,H", 5, "no stage holds norm"),
        ("E,t*2|t*3,H,N", 5, "not in the order of the model"),
        ("t*2,E|t*3,N,H", 5, "not in the order of the model"),
    ],
)
def test_misfits_are_named(text, n_layers, said):
    assert any(said in problem for problem in problems(parse_layout(text), n_layers))


def test_too_few_layers_leave_a_stage_empty():
    (problem,) = problems(split_by_weight(1, 4, 1, 1), 1)
    assert problem == "4 stages for 1 layers leave stage 2 empty"
