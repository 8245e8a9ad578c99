"""What one accelerator can do: peak FLOP/s, memory, and the links to its neighbours. Pure Python.

The trainer takes the peak for MFU from here; the planner takes everything. A device that is not in the table
is `None` and never "some usual card": an MFU against another card's peak is worse than none.

Peaks are the vendors' *dense* figures (their sheets often print twice that, for 2:4 sparsity). Memory is what
a process is offered (torch's `total_memory`), a little under the figure on the box. Link bandwidth is per GPU
and per direction, as the reference system wires it: NVLink, Infinity Fabric or PCIe inside, one network card
per GPU outside. Latencies are rules of thumb for one hop of a collective, good to a factor of two.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TERA = 1e12
GB = 1e9
GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """One accelerator. FLOP/s, bytes, bytes/s and seconds; None where the hardware has no such units."""

    name: str
    """Short name for the command line, e.g. "h100-80g"."""
    torch_names: tuple[str, ...]
    """What `torch.cuda.get_device_name` says, whole strings: slices and laptop parts must not match."""
    bf16_flops: float | None
    """Dense bf16 with fp32 accumulation; fp16 runs at the same rate on all cards that have bf16."""
    fp16_flops: float
    fp32_flops: float
    """fp32 outside the matrix units, the default precision of torch matmuls."""
    tf32_flops: float | None
    """fp32 inputs rounded to TF32 (`torch.set_float32_matmul_precision("high")`)."""
    fp8_flops: float | None
    memory: int
    """Bytes a process can be given."""
    memory_bandwidth: float
    fast_domain: int
    """How many GPUs the fast links join: a node, or a rack of NVLink."""
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    intra_node_latency: float = 3e-6
    inter_node_latency: float = 10e-6

    def peak_flops(self, dtype: str, tf32: bool = False) -> float | None:
        """Dense peak for matmuls in `dtype`: "bfloat16", "float16", "float32" or "float8".

        Returns None when the device has no units for it. Raises ValueError for any other name.
        """
        peaks = {
            "bfloat16": self.bf16_flops,
            "float16": self.fp16_flops,
            "float32": self.tf32_flops if tf32 and self.tf32_flops is not None else self.fp32_flops,
            "float8": self.fp8_flops,
        }
        if dtype not in peaks:
            raise ValueError(f"no peak is kept for dtype {dtype!r}; known: {', '.join(peaks)}")
        return peaks[dtype]


def _hopper_sxm(
    name: str, torch_names: tuple[str, ...], memory_gib: float, memory_bandwidth: float
) -> Device:
    """H100 and H200 SXM differ in memory only."""
    return Device(
        name=name,
        torch_names=torch_names,
        bf16_flops=989 * TERA,
        fp16_flops=989 * TERA,
        fp32_flops=67 * TERA,
        tf32_flops=494.5 * TERA,
        fp8_flops=1979 * TERA,
        memory=int(memory_gib * GIB),
        memory_bandwidth=memory_bandwidth,
        fast_domain=8,
        intra_node_bandwidth=450 * GB,
        inter_node_bandwidth=50 * GB,
    )


def _a100(
    name: str,
    torch_names: tuple[str, ...],
    memory_gib: float,
    memory_bandwidth: float,
    link: float = 300 * GB,
) -> Device:
    return Device(
        name=name,
        torch_names=torch_names,
        bf16_flops=312 * TERA,
        fp16_flops=312 * TERA,
        fp32_flops=19.5 * TERA,
        tf32_flops=156 * TERA,
        fp8_flops=None,
        memory=int(memory_gib * GIB),
        memory_bandwidth=memory_bandwidth,
        fast_domain=8,
        intra_node_bandwidth=link,
        inter_node_bandwidth=25 * GB,
    )


DEVICES: tuple[Device, ...] = (
    _a100("a100-40g", ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"), 39.4, 1555 * GB),
    _a100("a100-80g", ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), 79.1, 2039 * GB),
    _a100("a100-pcie-40g", ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"), 39.4, 1555 * GB, link=32 * GB),
    _a100("a100-pcie-80g", ("NVIDIA A100 80GB PCIe",), 79.1, 1935 * GB, link=32 * GB),
    _hopper_sxm("h100-80g", ("NVIDIA H100 80GB HBM3",), 79.1, 3352 * GB),
    _hopper_sxm("h100-96g", ("NVIDIA H100",), 94.5, 2400 * GB),  # HBM2e
    _hopper_sxm("h200", ("NVIDIA H200",), 139.8, 4800 * GB),
    Device(
        name="h100-pcie",
        torch_names=("NVIDIA H100 PCIe",),
        bf16_flops=756 * TERA,
        fp16_flops=756 * TERA,
        fp32_flops=51 * TERA,
        tf32_flops=378 * TERA,
        fp8_flops=1513 * TERA,
        memory=int(79.1 * GIB),
        memory_bandwidth=2039 * GB,
        fast_domain=8,
        intra_node_bandwidth=64 * GB,
        inter_node_bandwidth=50 * GB,
        intra_node_latency=6e-6,
    ),
    Device(
        name="h100-nvl",  # bridges join pairs only; a node of eight talks over PCIe
        torch_names=("NVIDIA H100 NVL",),
        bf16_flops=835 * TERA,
        fp16_flops=835 * TERA,
        fp32_flops=60 * TERA,
        tf32_flops=417.5 * TERA,
        fp8_flops=1671 * TERA,
        memory=int(93.1 * GIB),
        memory_bandwidth=3938 * GB,
        fast_domain=8,
        intra_node_bandwidth=64 * GB,
        inter_node_bandwidth=50 * GB,
        intra_node_latency=6e-6,
    ),
    Device(
        name="l40s",
        torch_names=("NVIDIA L40S",),
        bf16_flops=362 * TERA,
        fp16_flops=362 * TERA,
        fp32_flops=91.6 * TERA,
        tf32_flops=183 * TERA,
        fp8_flops=733 * TERA,
        memory=int(44.4 * GIB),
        memory_bandwidth=864 * GB,
        fast_domain=8,
        intra_node_bandwidth=32 * GB,
        inter_node_bandwidth=25 * GB,
        intra_node_latency=6e-6,
    ),
    Device(
        name="b200",
        torch_names=("NVIDIA B200",),
        bf16_flops=2250 * TERA,
        fp16_flops=2250 * TERA,
        fp32_flops=75 * TERA,
        tf32_flops=1125 * TERA,
        fp8_flops=4500 * TERA,
        memory=int(178.3 * GIB),
        memory_bandwidth=7700 * GB,
        fast_domain=8,
        intra_node_bandwidth=900 * GB,
        inter_node_bandwidth=50 * GB,
    ),
    Device(
        name="gb200",  # NVL72: one NVLink domain of 72 over 18 trays of four
        torch_names=("NVIDIA GB200",),
        bf16_flops=2500 * TERA,
        fp16_flops=2500 * TERA,
        fp32_flops=80 * TERA,
        tf32_flops=1250 * TERA,
        fp8_flops=5000 * TERA,
        memory=int(184 * GIB),
        memory_bandwidth=8000 * GB,
        fast_domain=72,
        intra_node_bandwidth=900 * GB,
        inter_node_bandwidth=50 * GB,
    ),
    Device(
        name="mi300x",
        torch_names=("AMD Instinct MI300X", "AMD Instinct MI300X VF", "AMD Instinct MI300X OAM"),
        bf16_flops=1307 * TERA,
        fp16_flops=1307 * TERA,
        fp32_flops=163.4 * TERA,
        tf32_flops=653.7 * TERA,
        fp8_flops=2615 * TERA,
        memory=int(191.7 * GIB),
        memory_bandwidth=5300 * GB,
        fast_domain=8,
        intra_node_bandwidth=448 * GB,
        inter_node_bandwidth=50 * GB,
    ),
    Device(
        name="rtx4090",
        torch_names=("NVIDIA GeForce RTX 4090",),
        bf16_flops=165.2 * TERA,
        fp16_flops=165.2 * TERA,
        fp32_flops=82.6 * TERA,
        tf32_flops=82.6 * TERA,
        fp8_flops=330.3 * TERA,
        memory=int(23.5 * GIB),
        memory_bandwidth=1008 * GB,
        fast_domain=8,
        intra_node_bandwidth=32 * GB,
        inter_node_bandwidth=3.125 * GB,  # one 200 Gb/s card shared by the node
        intra_node_latency=10e-6,
    ),
    Device(
        name="v100-32g",
        torch_names=("Tesla V100-SXM2-32GB",),
        bf16_flops=None,
        fp16_flops=125 * TERA,
        fp32_flops=15.7 * TERA,
        tf32_flops=None,
        fp8_flops=None,
        memory=int(31.7 * GIB),
        memory_bandwidth=900 * GB,
        fast_domain=8,
        intra_node_bandwidth=150 * GB,
        inter_node_bandwidth=12.5 * GB,
    ),
)
"""Every device known, fastest links of each as its vendor's eight-GPU system has them."""


def find_device(name: str) -> Device | None:
    """The device with this short name ("h100-80g") or torch device name ("NVIDIA H100 80GB HBM3").

    Case does not count; otherwise the whole name must match, so that a slice ("NVIDIA H100 80GB HBM3 MIG
    1g.10gb") or a cut-down sibling ("NVIDIA GeForce RTX 4090 D") is unknown. Unknown is None.
    """
    wanted = name.strip().lower()
    for device in DEVICES:
        if wanted == device.name or wanted in (torch_name.lower() for torch_name in device.torch_names):
            return device
    return None


def device_names() -> tuple[str, ...]:
    """The short names, for help texts and error messages."""
    return tuple(device.name for device in DEVICES)


def host_memory_limit() -> int:
    """Bytes of host memory this process may use: the machine's, or a container's limit when that is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [machine]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or its limit is "max"
    return min(limits)
