"""Which moment of a step it is: the phase, and the part of the model that is at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks

from titan5d.dryrun.fake import DEVICE, FakeDevice
from titan5d.metrics.memory_ledger import MemoryLedger, MemoryUse
from titan5d.metrics.phases import StepPhases
from titan5d.models.decoder import Block
from titan5d.models.output import OutputHead


class Moment(NamedTuple):
    """`part` is the name of a module, "" between them."""

    phase: str
    part: str

    def __str__(self) -> str:
        return f"{self.phase}, {self.part}" if self.part else self.phase


class Moments(StepPhases):
    """Knows the moment, and tells the ledger what is made in it.

    Attributes:
        failed: the moment in which a phase ended with an error.
        before_forward: called before each forward phase.

    The part is the innermost module that runs; in backward the block whose gradient is made, or, if that is computed
    again, the module inside that was the last to run.
    """

    def __init__(self, model: nn.Module, device: FakeDevice) -> None:
        super().__init__(DEVICE)
        self.fake_device = device
        self.names = {module: name for name, module in model.named_modules()}
        self.running: list[nn.Module] = []
        self.in_backward = ""
        self.failed: Moment | None = None
        self.before_forward: Callable[[], object] = lambda: None
        self.ledger: TimedLedger | None = None

    @property
    def now(self) -> Moment:
        inside = self.names[self.running[-1]] if self.running else ""
        return Moment(self.current, inside or (self.in_backward if self.current == "backward" else ""))

    @property
    def coarse(self) -> Moment:
        """The same with a block as the smallest part."""
        phase, part = self.now
        names = part.split(".")
        return Moment(phase, ".".join(names[:2] if names[0] == "layers" else names[:1]))

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if phase == "forward":
            self.before_forward()
        with super().__call__(phase):
            self.running.clear()
            self.in_backward = "output"  # until the first block has its gradient
            self._tell(
                "logits" if phase == "backward" else "other" if phase == "optimizer" else "activations"
            )
            try:
                with self.fake_device.counting() if phase == "count" else nullcontext():
                    yield
            except Exception:
                self.failed = self.failed or self.now
                raise
        self._tell("activations")

    @contextmanager
    def watching(self, ledger: TimedLedger) -> Iterator[None]:
        """Follows the model's calls inside the block."""
        self.ledger = ledger
        ledger.moments = self
        before = hooks.register_module_forward_pre_hook(self._enters)
        after = hooks.register_module_forward_hook(self._leaves)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enters(self, module: nn.Module, args: Any) -> None:
        if module not in self.names:
            return
        name = self.names[module]
        # What is computed again stops in the middle, once backward has all it needs, and leaves no module
        while self.running and not name.startswith(self.names[self.running[-1]]):
            self.running.pop()
        self.running.append(module)
        if isinstance(module, OutputHead):
            self._tell("logits")

    def _leaves(self, module: nn.Module, args: Any, out: Any) -> None:
        if module not in self.names:
            return
        if module in self.running:
            del self.running[self.running.index(module) :]
        if isinstance(module, OutputHead):
            self._tell("activations")
        if isinstance(module, Block) and isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(partial(self._gradient_arrives, self.names[module]))

    def _gradient_arrives(self, name: str, gradient: torch.Tensor) -> None:
        self.running.clear()
        self.in_backward = name
        self._tell("activations")

    def _tell(self, made: Any) -> None:
        if self.ledger is not None:
            self.ledger.made = made


class TimedLedger(MemoryLedger):
    """A memory ledger that knows the moments.

    Attributes:
        peak_moment: of the highest total.
        timeline: moment -> memory at its fullest operator, in the order in which they began.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.moments: Moments | None = None
        self.peak_moment = Moment("", "")
        self.timeline: dict[Moment, MemoryUse] = {}
        self._fullest: dict[Moment, int] = {}

    def _note(self) -> None:
        before = self.peak
        super()._note()
        if self.moments is None:
            return
        if self.peak is not before:
            self.peak_moment = self.moments.now
        moment, total = self.moments.coarse, sum(self._sums.values())
        if total >= self._fullest.get(moment, 1):
            self._fullest[moment], self.timeline[moment] = total, MemoryUse(**self._sums)
