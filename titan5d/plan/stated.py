"""The line of a TOML that says what it is made for: `# Hardware: 64 x h100-80g`."""

from __future__ import annotations

import re
from pathlib import Path

_LINE = re.compile(r"^#\s*Hardware:\s*([0-9][0-9,]*)\s*x\s*([A-Za-z0-9-]+)", re.MULTILINE)


def stated_hardware(path: Path) -> tuple[int, str] | None:
    """(GPUs, short name) that a config states; None when it states nothing."""
    match = _LINE.search(path.read_text(encoding="utf-8"))
    return None if match is None else (int(match.group(1).replace(",", "")), match.group(2))
