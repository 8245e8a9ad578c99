"""Everything the planner says about one run: memory by rank, traffic by axis, step time, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from titan5d.hardware import Device
from titan5d.metrics import flops
from titan5d.metrics.flops import flop_shape, training_flops
from titan5d.plan.assumptions import Assumptions
from titan5d.plan.case import Case
from titan5d.plan.compute import Computer
from titan5d.plan.network import Network
from titan5d.plan.rank_memory import RankMemory, Replay, fullest, pipeline_memory
from titan5d.plan.step_time import StepTime, step_time

SAFE = 0.8
"""Share of the memory below which no run of 454 ran out (Fujii et al. 2024, arXiv:2411.06465)."""


@dataclass(frozen=True)
class Machine:
    """What the run is planned for."""

    device: Device
    gpus: int
    network: Network
    assumptions: Assumptions

    @property
    def computer(self) -> Computer:
        return Computer(self.device, self.assumptions)


@dataclass(frozen=True)
class Prediction:
    """One layout on one machine.

    Attributes:
        ranks: memory of every pipeline rank.
        time: of one optimizer step.
        tokens: of one optimizer step.
        model_flops, hardware_flops: of one step, causal; model_flops_full counts the whole square of attention, as
            some published figures do.
        peak: dense FLOP/s of one device in the compute type.
    """

    case: Case
    machine: Machine
    ranks: tuple[RankMemory, ...]
    time: StepTime
    tokens: float
    model_flops: float
    model_flops_full: float
    hardware_flops: float
    peak: float

    @property
    def fullest(self) -> RankMemory:
        return fullest(self.ranks)

    @property
    def margin(self) -> float:
        """Bytes that are left on the fullest rank; negative: that many too few."""
        return self.machine.device.memory - self.fullest.total

    @property
    def fits(self) -> bool:
        return self.margin >= 0

    @property
    def verdict(self) -> str:
        """fits, tight, or over."""
        if not self.fits:
            return "over"
        return "fits" if self.fullest.total <= SAFE * self.machine.device.memory else "tight"

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.time.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.machine.gpus

    def _per_gpu(self, flops_of_step: float) -> float:
        return flops_of_step / self.time.total / self.machine.gpus

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of one GPU, causal."""
        return self._per_gpu(self.model_flops) / 1e12

    @property
    def mfu(self) -> float:
        return self._per_gpu(self.model_flops) / self.peak

    @property
    def mfu_full(self) -> float:
        """With the whole square of attention counted."""
        return self._per_gpu(self.model_flops_full) / self.peak

    @property
    def hfu(self) -> float:
        return self._per_gpu(self.hardware_flops) / self.peak


def predict(case: Case, machine: Machine, replay: Replay | None = None) -> Prediction:
    """Memory and time of one layout. replay: of its table, as `pipeline_memory` takes it."""
    computer = machine.computer
    counts = training_flops(flop_shape(case.args))
    row = flops.work_of([case.seq_len])
    rows = case.global_tokens / case.seq_len
    model = counts.model_flops(row) * rows
    share = case.recompute.share
    again = {
        "none": flops.Recompute(),
        "selective": flops.Recompute(0.0, share),
        "full": flops.Recompute(share, share),
    }[case.recompute.mode]
    return Prediction(
        case=case,
        machine=machine,
        ranks=pipeline_memory(case, machine.assumptions, replay=replay),
        time=step_time(case, computer, machine.network),
        tokens=case.global_tokens,
        model_flops=model,
        model_flops_full=counts.per_token(case.seq_len, "full") * case.global_tokens,
        hardware_flops=counts.hardware_flops(row, again) * rows,
        peak=computer.peak(case.element),
    )
