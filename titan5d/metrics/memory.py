"""How much memory this rank uses at most: the CUDA allocator's peaks, or the process's resident set on a CPU.

On CUDA the peak that decides whether a run fits is what the allocator has *reserved* (fragments included);
*active* is what live tensors needed of it. On a CPU there is no allocator to ask: the peak is the resident
set, so it also holds the interpreter and the libraries (about 0.3 GiB).
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from titan5d.hardware import GIB, host_memory_limit


@dataclass(frozen=True)
class MemorySnapshot:
    """Peaks since the last `reset_peak`, in bytes. What a CPU does not have is None."""

    peak: int
    """CUDA: most bytes reserved by the allocator. CPU: largest resident set."""
    total: int
    """What the device offers a process."""
    active_peak: int | None = None
    """CUDA: most bytes in live tensors."""
    current: int | None = None
    """CPU: resident set now."""
    alloc_retries: int | None = None
    """CUDA: how often the allocator gave its cache back to find room; each time costs speed."""
    ooms: int | None = None

    def metrics(self) -> dict[str, float | int]:
        """The values under their names in metrics.jsonl; sizes in GiB, shares in percent of `total`."""
        values: dict[str, float | int] = {
            "memory_peak_gib": self.peak / GIB,
            "memory_peak_percent": 100 * self.peak / self.total,
        }
        if self.active_peak is not None:
            values["memory_active_gib"] = self.active_peak / GIB
            values["memory_active_percent"] = 100 * self.active_peak / self.total
        if self.current is not None:
            values["memory_current_gib"] = self.current / GIB
        if self.alloc_retries is not None:
            values["memory_alloc_retries"] = self.alloc_retries
        if self.ooms is not None:
            values["memory_ooms"] = self.ooms
        return values


class MemoryMonitor:
    """Peak memory of one device, as seen by this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total = (
            torch.cuda.get_device_properties(device).total_memory
            if device.type == "cuda"
            else host_memory_limit()
        )
        self.reset_peak()

    def snapshot(self) -> MemorySnapshot:
        """Peaks since the last reset; does not wait for the device."""
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            return MemorySnapshot(
                peak=stats.get("reserved_bytes.all.peak", 0),
                total=self.total,
                active_peak=stats.get("active_bytes.all.peak", 0),
                alloc_retries=stats.get("num_alloc_retries", 0),
                ooms=stats.get("num_ooms", 0),
            )
        current, peak = resident_set()
        return MemorySnapshot(peak=peak, total=self.total, current=current)

    def reset_peak(self) -> None:
        """Starts a new peak from what is in use now.

        Where the system keeps the peak of the resident set for the life of the process (no writable
        /proc/self/clear_refs), a CPU's peak stays that of the whole process.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError):  # the peak then covers the life of the process, as said above
            Path("/proc/self/clear_refs").write_text("5")  # 5: set the peak to the current size, proc(5)


def resident_set() -> tuple[int, int]:
    """(current, peak) bytes of this process's resident set."""
    try:
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
        )
        current, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        return current, peak
    except (OSError, KeyError):
        import resource  # no /proc: only the peak is known, in bytes on macOS and KiB elsewhere

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
        return peak, peak
