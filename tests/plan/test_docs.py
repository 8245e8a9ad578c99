"""The output shown in docs/choosing.md is what the command says today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from titan5d.plan.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "choosing.md"
BLOCKS = re.findall(r"```\n\$ titan5d plan (.*?)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_there_is_something_to_check() -> None:
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command[:60] for command, _ in BLOCKS])
def test_output_is_that_of_the_command(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(shlex.split(command))
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    place = 0
    for line in shown.splitlines():
        line = line.rstrip()
        if line in ("", "..."):
            continue
        assert line in said[place:], f"not in the output, or not in this order: {line}"
        place += said[place:].index(line) + 1
