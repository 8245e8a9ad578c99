"""Sources for tests of worker processes: one that breaks off, one that tells how much memory the worker took.

Light, because the workers import this file.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from titan5d.data.corpus import LineFiles, Piece, TextFiles
from titan5d.data.errors import DataError


class BreakingLines(LineFiles):
    """Fails in the way `how` (data, disk, killed) at the line that holds the word `break`."""

    def __init__(self, files: list[Path], how: str) -> None:
        super().__init__(files, "breaking lines")
        self.how = how

    def documents(self, piece: Piece, skipped: Counter[str]) -> Iterator[str]:
        for text in super().documents(piece, skipped):
            if "break" in text:
                if self.how == "data":
                    raise DataError("line 7 is odd")
                if self.how == "disk":
                    raise OSError(28, "No space left")
                os.kill(os.getpid(), signal.SIGKILL)
            yield text


class MeasuredFiles(TextFiles):
    """Writes the largest memory of the worker so far (KiB) into `report` after each document."""

    def __init__(self, files: list[Path], report: Path) -> None:
        super().__init__(files, "measured files")
        self.report = report

    def documents(self, piece: Piece, skipped: Counter[str]) -> Iterator[str]:
        for text in super().documents(piece, skipped):
            yield text
            status = Path("/proc/self/status").read_text()
            self.report.write_text(status.split("VmHWM:")[1].split()[0])
