"""What a rank holds at the actions of a table, counted by hand."""

from __future__ import annotations

from titan5d.plan.table_moments import (
    FullestActions,
    Held,
    StageBytes,
    fullest_actions,
    fullest_of,
    table_states,
)
from titan5d.schedules import catalog
from titan5d.schedules.table import Action, Schedule, loop_placement


def one_rank(row: str, stages: int = 1) -> Schedule:
    """A table of one rank: "F0.0 I0.0 W0.0" is kind, stage, micro-batch."""
    actions = tuple(Action(int(word[1]), word[0], int(word[3])) for word in row.split())  # type: ignore[arg-type]
    count = 1 + max(action.microbatch for action in actions)
    return Schedule("by hand", count, loop_placement(1, stages), (actions,))


SPLIT = StageBytes(activation=10, kept_for_weights=4, gradients=8, put_off=6, waiting=3)


def test_weight_gradients_wait_until_the_next_backward() -> None:
    (found,) = fullest_actions(one_rank("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1 F0.2 I0.2 W0.2"), [SPLIT])
    # third I: one micro-batch, 8 bytes added up from the first two, 3 that wait from the second
    assert found.input == Held(10, 8 + 3) and found.forward == Held(10, 8 + 3)
    assert found.whole is None


def test_a_first_backward_leaves_what_is_not_put_off() -> None:
    (found,) = fullest_actions(one_rank("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1"), [SPLIT])
    # second I: its own micro-batch, what W needs of the first, and the gradients that I made
    assert found.forward == Held(20, 0) and found.input == Held(20, 0)
    (found,) = fullest_actions(one_rank("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1"), [SPLIT])
    assert found.input == Held(14, 8 - 6)


def test_without_a_split_a_filled_pipe_has_no_gradients_yet() -> None:
    (found,) = fullest_actions(one_rank("F0.0 F0.1 B0.0 B0.1"), [SPLIT])
    assert found.whole == Held(20, 0) and found.input is None
    (found,) = fullest_actions(one_rank("F0.0 B0.0 F0.1 B0.1"), [SPLIT])
    assert found.whole == Held(10, 8)


def test_what_need_not_wait_is_added_at_once() -> None:
    (found,) = fullest_actions(one_rank("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1"), [SPLIT._replace(waiting=0)])
    assert found.input == Held(10, 8)


def test_the_head_counts_the_last_stage_only() -> None:
    table = one_rank("F0.0 F0.1 F1.0 B1.0 B0.0 F1.1 B1.1 B0.1", stages=2)
    last = StageBytes(1, 0, 2, 0, 0)
    (found,) = fullest_actions(table, [SPLIT, last])
    # the first time both micro-batches are there, the second time one, but gradients of both stages
    assert found.head == Held(20 + 1, 0)
    assert found.whole == Held(20, 2)


def test_a_table_is_played_once_for_all_sizes() -> None:
    table = catalog.build("Interleaved1F1B", 4, 2, 8)
    states = table_states(table, [False] * 8)
    for large in range(8):
        sizes = [StageBytes(9.0 if stage == large else 1.0, 0, 3.0, 0, 0) for stage in range(8)]
        for rank, found in enumerate(fullest_of(states, sizes)):
            held, most, added = 0.0, 0.0, set[int]()
            for stage, kind, _ in table.actions(rank):
                held += sizes[stage].activation * (kind == "F")
                most = max(most, held + 3 * len(added))
                held -= sizes[stage].activation * (kind == "B")
                added |= {stage} if kind == "B" else set()
            fullest = [one for one in (found.forward, found.whole) if one is not None]
            assert max(one.activations + one.gradients for one in fullest) == most


def test_states_that_hold_less_are_left_out() -> None:
    (found,) = table_states(one_rank("F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3"), [False])
    # two micro-batches before there are gradients hold less than two with them
    assert found.at["F"] == found.at["B"] == ((2, 0, 1, 1, 0),)
    assert found.at["head"] == found.at["F"]


def test_within_is_at_every_action_and_of_the_same_kinds() -> None:
    less, more, other = Held(1, 2), Held(1, 3), Held(2, 1)
    assert FullestActions(less, None, None, less).is_within(FullestActions(more, None, None, less))
    assert not FullestActions(more, None, None, less).is_within(FullestActions(less, None, None, more))
    assert not FullestActions(less, None, None, None).is_within(FullestActions(other, None, None, None))
    assert not FullestActions(less, None, None, None).is_within(FullestActions(more, more, None, None))
