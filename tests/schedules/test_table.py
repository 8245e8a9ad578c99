from __future__ import annotations

import subprocess
import sys

from titan5d.schedules import catalog
from titan5d.schedules.check import problems
from titan5d.schedules.table import Action, Overlap, Schedule, loop_placement, plain_tuples, v_placement


def test_placements() -> None:
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    schedule = catalog.build("ZBVZeroBubble", 3, 2, 3)
    assert schedule.stages_of_rank(1) == (1, 4)
    assert schedule.chunk_of_stage == (0, 0, 0, 1, 1, 1)
    assert schedule.most_chunks == 2


def test_plain_tuples_are_torchs_fields() -> None:
    pair = Overlap(Action(0, "F", 4), Action(1, "B", 2))
    schedule = Schedule("x", 5, (0, 0), ((Action(0, "F", 3), pair),))
    inner = ((0, "F", 4), (1, "B", 2))
    assert plain_tuples(schedule) == {0: [(0, "F", 3, None), (-1, "OVERLAP_F_B", None, inner)]}
    assert str(pair) == "(0F4;1B2)OVERLAP_F_B"


def test_forwards_alone_run_too() -> None:
    for name in catalog.NAMES:
        forwards = catalog.build(name, 3, catalog.default_chunks(name), 7).forwards()
        assert problems(forwards) == []
        kinds = {action.kind for rank in range(3) for action in forwards.actions(rank)}
        assert kinds == {"F"}


def test_imports_no_torch() -> None:
    code = (
        "import sys, titan5d.schedules.cli, titan5d.schedules.catalog;"
        "sys.exit(any(name == 'torch' or name.startswith('torch.') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
