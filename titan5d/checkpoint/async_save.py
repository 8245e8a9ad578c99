"""Writing while training goes on: the step waits for a copy in CPU memory only, a thread writes the copy.

    step 8          copy   step 9, 10, 11 ...
    writer thread        [ rank-00000.safetensors ]   all ranks done -> manifest, at the end of the next step

The copy is a copy on the CPU too: without it, step 9 would change what is being written. Its memory is kept for the
next save. The thread takes part in no collective; ranks learn of each other's writers from one number a step.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from titan5d.checkpoint.manifest import Manifest
from titan5d.checkpoint.save import Written, write_share
from titan5d.checkpoint.state import Block


class Staging:
    """Copies of a rank's share in CPU memory, page-locked if asked for (then the device copies at full speed)."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._copies: dict[str, Tensor] = {}

    def copy(self, blocks: Mapping[str, Block]) -> dict[str, Tensor]:
        """The values of now. The copies of the call before are overwritten."""
        for name, block in blocks.items():
            there = self._copies.get(name)
            if there is None or there.shape != block.local.shape or there.dtype != block.local.dtype:
                there = torch.empty(block.local.shape, dtype=block.local.dtype, pin_memory=self.pinned)
                self._copies[name] = there
            there.copy_(block.local, non_blocking=self.pinned)
        if self.pinned:
            torch.cuda.synchronize()
        return {name: self._copies[name] for name in blocks}


@dataclass
class Pending:
    """A checkpoint that a thread is writing. `manifest` has no tensors and files yet."""

    partial: Path
    manifest: Manifest
    thread: threading.Thread
    result: list[Written] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return self.thread.is_alive()

    def wait(self) -> Written:
        """What the thread has written."""
        self.thread.join()
        return self.result[0]


def write_behind(
    partial: Path,
    manifest: Manifest,
    rank: int,
    blocks: Mapping[str, Block],
    dtype: torch.dtype | None,
    copies: Mapping[str, Tensor],
) -> Pending:
    """Starts writing `copies` of this rank's share."""
    result: list[Written] = []

    def work() -> None:
        try:
            result.append(write_share(partial, rank, blocks, dtype, copies))
        except Exception as error:  # the other ranks must hear of it, whatever it is
            result.append(Written(problems=[f"{type(error).__name__}: {error}"]))

    # Not a daemon: Python waits for it, so that no exit cuts a file short
    thread = threading.Thread(target=work, name="titan5d checkpoint")
    thread.start()
    return Pending(partial, manifest, thread, result)
