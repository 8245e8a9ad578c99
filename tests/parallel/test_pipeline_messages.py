"""Messages between pipeline ranks: sends match receives, and ranks that exchange them in order never stand still."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from titan5d.parallel.pipeline_messages import message_lines, needed_messages, receiver
from titan5d.parallel.pipeline_schedule import forward_table
from titan5d.schedules import catalog
from titan5d.schedules.check import problems
from titan5d.schedules.simulate import outputs
from titan5d.schedules.table import Schedule, parts


@st.composite
def tables(draw) -> Schedule:
    name = draw(st.sampled_from(catalog.NAMES))
    ranks = draw(st.integers(2, 5))
    chunks = catalog.default_chunks(name)
    if name in ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"):
        chunks = draw(st.integers(2, 3))
    table = catalog.build(name, ranks, chunks, draw(st.integers(1, 9)))
    return forward_table(table, draw(st.integers(1, 7))) if draw(st.booleans()) else table


def deadlock(table: Schedule, seed: int) -> list[int]:
    """Plays the exchange with the strictest delivery there is: a message arrives only once it has been sent AND its
    receive is posted, and lines are first in, first out. Ranks move in random turns. Returns the ranks that stick."""
    lines = message_lines(table)
    place = {message: index for line in lines.values() for index, message in enumerate(line)}
    posted, sent, position = Counter(), Counter(), [0] * table.n_ranks
    turns = random.Random(seed)
    moving = set(range(table.n_ranks))
    while moving:
        rank = turns.choice(sorted(moving))
        moving.discard(rank)
        if position[rank] == len(table.rows[rank]):
            continue
        row = table.rows[rank]
        for slot in row[position[rank] : position[rank] + 2]:
            for message in needed_messages(slot, rank, table):
                line = (table.rank_of_stage[message[1]], rank)
                posted[line] = max(posted[line], place[message] + 1)
        needed = needed_messages(row[position[rank]], rank, table)
        arrived = [
            place[message] < min(posted[line], sent[line])
            for message in needed
            for line in [(table.rank_of_stage[message[1]], rank)]
        ]
        if not all(arrived):
            continue  # woken by the sender
        for action in parts(row[position[rank]]):
            for made in outputs(action):
                to = receiver(made, table)
                if to is not None:
                    assert lines[rank, to][sent[rank, to]] == made
                    sent[rank, to] += 1
                    moving.add(to)
        position[rank] += 1
        moving.add(rank)
    return [rank for rank, at in enumerate(position) if at < len(table.rows[rank])]


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(0, 100))
def test_every_table_runs_to_its_end_whatever_the_turns(table, seed):
    assert problems(table) == []
    assert deadlock(table, seed) == []


@settings(max_examples=60, deadline=None)
@given(tables())
def test_sends_match_receives(table):
    sent = Counter(message for line in message_lines(table).values() for message in line)
    received = Counter(
        message
        for rank in range(table.n_ranks)
        for slot in table.rows[rank]
        for message in needed_messages(slot, rank, table)
    )
    assert sent == received
    assert all(times == 1 for times in sent.values())


def test_the_turn_of_a_v_needs_no_message():
    table = catalog.build("ZBVZeroBubble", 2, 2, 1)  # stages 0 1 | 1 0: ranks 0 1 1 0
    down, up = message_lines(table)[0, 1], message_lines(table)[1, 0]
    assert sorted(down) == [("F", 0, 0), ("I", 3, 0)]
    assert sorted(up) == [("F", 2, 0), ("I", 1, 0)]


def test_a_receive_posted_out_of_order_would_be_noticed():
    """The play above can fail: a rank that needs its messages in another order than they are made, and posts only
    the one it needs next, is caught by `place`; here by a table whose ranks wait in a circle."""
    first, second = catalog.build("1F1B", 2, 1, 2).rows
    circle = Schedule("circle", 2, (0, 1), (tuple(reversed(first)), second))
    assert deadlock(circle, 0) == [0, 1]
