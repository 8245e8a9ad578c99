"""docs/schedules.md shows what the tool prints: each block that starts with a command is run again."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from titan5d.schedules import catalog, cli

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
BLOCKS = re.findall(r"^```\n\$ titan5d schedule (.*)\n((?:.*\n)*?)```$", PAGE.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize(("command", "shown"), BLOCKS)
def test_the_page_shows_what_the_tool_prints(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "172")
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert cli.run(parser.parse_args(shlex.split(command))) == 0
    assert shown in capsys.readouterr().out


def test_every_schedule_is_drawn() -> None:
    drawn = "".join(command for command, _ in BLOCKS)
    assert all(name in drawn for name in catalog.NAMES)
