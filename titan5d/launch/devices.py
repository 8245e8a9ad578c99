"""What this machine offers, found without importing torch: its GPUs, and the cores a process may use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that torch will see: those present, less what CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES hides."""
    present = _nvidia_gpus() or _amd_gpus()
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in environ:
            present = min(present, _listed(environ[name]))
    return present


def _listed(devices: str) -> int:
    """Entries up to the first that is none: an empty list, or -1, hides all that follows."""
    count = 0
    for entry in devices.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return count


def _nvidia_gpus() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def _amd_gpus(nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> int:
    """The driver lists processors and GPUs alike; processors have gpu_id 0."""
    count = 0
    for file in nodes.glob("*/gpu_id"):
        try:
            count += file.read_text().strip() not in ("", "0")
        except OSError:  # a GPU that this container may not use
            continue
    return count


def torch_build() -> tuple[str, bool]:
    """(version, whether it was built for GPUs) of the installed torch, read from its version file.

    Raises ModuleNotFoundError when there is no torch.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torch is not installed")
    text = (Path(spec.origin).parent / "version.py").read_text()
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    gpu = re.search(r"^(?:cuda|hip)\b[^=]*=\s*['\"]", text, re.MULTILINE)
    return (version.group(1) if version else "unknown"), gpu is not None


def count_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may run on, at most what its container's quota pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max" for no limit
        return cores
