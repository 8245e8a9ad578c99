"""What can go wrong with a checkpoint, by what the run does about it."""

from __future__ import annotations


class CheckpointRefused(Exception):
    """What is asked for cannot be loaded or saved, known before the first step. Exit status 2."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"refused: {problem}" for problem in problems))


class SaveFailed(Exception):
    """A rank could not write its part; known to all ranks. The checkpoint does not exist; exit status 1."""


class Damaged(Exception):
    """A file of a checkpoint is not what was written. The text names it."""
