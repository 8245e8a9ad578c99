"""What the planner takes for granted about hardware: each number has a name, is printed, and can be set by a flag.

Peaks and bandwidths of vendors are never reached. How much of them a kernel or a collective reaches depends on the
hardware (clocks under load, kernels that exist for it), so there is one set for each kind, and no other knob: no model,
no layout and no published run has a number of its own. docs/planning.md says where each comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from titan5d.hardware import GIB, Device


@dataclass(frozen=True)
class Assumptions:
    """One set. Shares are of the vendor's figure.

    Attributes:
        gemm: share of peak FLOP/s of a matrix product so large that its shape costs nothing.
        attention_forward, attention_backward: the same of fused attention on a long row.
        attention_ramp: tokens of a row at which attention reaches half of that.
        multiprocessors: of one device; products are cut into tiles, and a last round that does not fill them is lost.
        grouped_gemm: share of that again for the products of experts.
        memory: share of the memory bandwidth that kernels between the products reach.
        eager_traffic: how many times the bytes these kernels move without torch.compile.
        intra_link, inter_link: share of the links' bandwidth that a collective reaches.
        overlap_cost: by how much a collective slows what computes beside it, as a share of its own time.
        load_imbalance: rows of the fullest expert rank over the mean.
        step_overlap: how much of a pipeline's fill the next step hides, 0 to 1: this runtime clips by one norm before
            any rank updates, so 0; 1 = updates that are validated later (arXiv:2401.10241).
        step_overhead: seconds a step for norm, clip, logging and the host.
        allocator: memory lost to fragmentation and rounding, as a share of what comes and goes.
        context: bytes of driver, kernels and communicators on each device.
    """

    gemm: float
    attention_forward: float
    attention_backward: float
    attention_ramp: float = 600.0
    multiprocessors: int = 132
    grouped_gemm: float = 0.85
    memory: float = 0.85
    eager_traffic: float = 3.3
    intra_link: float = 0.8
    inter_link: float = 0.85
    overlap_cost: float = 0.1
    load_imbalance: float = 1.1
    step_overlap: float = 0.0
    step_overhead: float = 0.01
    allocator: float = 0.10
    context: float = 1.5 * GIB

    def with_values(self, settings: list[str]) -> Assumptions:
        """A copy with `name=value` settings. Raises ValueError naming what is not known or out of range."""
        values: dict[str, float] = {}
        names = [field.name for field in fields(self)]
        for setting in settings:
            name, equals, text = setting.partition("=")
            if name not in names or not equals:
                raise ValueError(f"--assume {setting}: write NAME=NUMBER, NAME one of {', '.join(names)}")
            try:
                value = float(text)
            except ValueError:
                raise ValueError(f"--assume {setting}: {text!r} is no number") from None
            least, most = _RANGES.get(name, (0.01, 1.0))
            if not least <= value <= most:
                raise ValueError(f"--assume {setting}: {name} lies between {least:g} and {most:g}")
            values[name] = value
        return replace(self, **values)  # type: ignore[arg-type]


_RANGES = {
    "attention_ramp": (0.0, 1e6),
    "multiprocessors": (1, 10_000),
    "eager_traffic": (1.0, 20.0),
    "overlap_cost": (0.0, 1.0),
    "step_overlap": (0.0, 1.0),
    "load_imbalance": (1.0, 1000.0),
    "step_overhead": (0.0, 100.0),
    "allocator": (0.0, 1.0),
    "context": (0.0, 1e12),
}
"""Of names that are not shares above 0."""

HOPPER = Assumptions(gemm=0.61, attention_forward=0.42, attention_backward=0.38)
"""H100 and H200 SXM at 700 W."""
HOPPER_500W = Assumptions(gemm=0.47, attention_forward=0.36, attention_backward=0.32)
"""H100 with 96 GB and a limit of 500 W: the same chip, at lower clocks under load."""
AMPERE = Assumptions(gemm=0.76, attention_forward=0.6, attention_backward=0.5, multiprocessors=108)
"""A100 SXM, which reaches more of a lower peak."""
PCIE = Assumptions(
    gemm=0.6, attention_forward=0.45, attention_backward=0.38, multiprocessors=114, intra_link=0.7
)
"""Cards without NVLink between all of a node. Not checked against a run."""
BLACKWELL = Assumptions(gemm=0.65, attention_forward=0.4, attention_backward=0.35, multiprocessors=148)
"""B200, GB200. Not checked against a run."""
CDNA3 = Assumptions(
    gemm=0.45,
    attention_forward=0.3,
    attention_backward=0.22,
    multiprocessors=304,
    intra_link=0.7,
    memory=0.75,
)
"""MI300X. Not checked against a run."""
CONSUMER = Assumptions(
    gemm=0.85,
    attention_forward=0.7,
    attention_backward=0.6,
    multiprocessors=128,
    intra_link=0.6,
    inter_link=0.7,
)
"""RTX 4090 and L40S, whose products are limited by power. Not checked against a run."""
VOLTA = Assumptions(gemm=0.75, attention_forward=0.4, attention_backward=0.3, multiprocessors=80)
"""V100. Not checked against a run."""

_SETS = {
    "a100-40g": AMPERE,
    "a100-80g": AMPERE,
    "a100-pcie-40g": PCIE,
    "a100-pcie-80g": PCIE,
    "h100-80g": HOPPER,
    "h100-96g": HOPPER_500W,
    "h200": HOPPER,
    "h100-pcie": PCIE,
    "h100-nvl": PCIE,
    "l40s": CONSUMER,
    "b200": BLACKWELL,
    "gb200": BLACKWELL,
    "mi300x": CDNA3,
    "rtx4090": CONSUMER,
    "v100-32g": VOLTA,
}
"""Device -> set; a test asks that every device has one."""

CHECKED = ("a100-80g", "h100-80g", "h100-96g")
"""Devices whose set was compared with published runs."""


def assumptions_of(device: Device) -> Assumptions:
    """The set of a device."""
    return _SETS[device.name]
