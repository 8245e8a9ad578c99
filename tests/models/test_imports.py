"""Model code is single-device: it imports no torch.distributed and nothing of the rooms above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import titan5d.models

ROOM = Path(titan5d.models.__file__).parent
ROOMS_ABOVE = ("parallel", "schedules", "data", "train", "checkpoint", "metrics", "plan", "launch")
FORBIDDEN = ("torch.distributed", *(f"titan5d.{room}" for room in ROOMS_ABOVE))


def forbidden_imports(source: str) -> list[str]:
    """Everything FORBIDDEN that `source` imports or reaches as an attribute, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in this package"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        found += [name for name in names if f"{name}.".startswith(tuple(f"{room}." for room in FORBIDDEN))]
    return found


@pytest.mark.parametrize("path", sorted(ROOM.rglob("*.py")), ids=lambda path: path.name)
def test_models_import_nothing_of_the_cuts(path: Path) -> None:
    assert forbidden_imports(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "import torch\ndef f():\n    torch.distributed.barrier()",
        "def f():\n    from titan5d.parallel import mesh",
        "import titan5d.train.step",
    ],
)
def test_the_check_sees_each_way_to_import(source: str) -> None:
    assert forbidden_imports(source)
