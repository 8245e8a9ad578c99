"""The peak FLOP/s that MFU is a share of: set by hand, from the device table, or measured here and now.

A device that is not in the table (every CPU, a new card, a slice of one) never borrows another's peak. It is
timed on plain matmuls for less than a second and the result is marked "measured" wherever it is shown: MFU is
then the share of what this device's own matmul library reaches, not of a data sheet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from titan5d.hardware import find_device

MEASURED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one device and where the number is from."""

    flops_per_second: float
    source: str
    """E.g. "table: h200, bfloat16", "measured on this device (...)" or "set by metrics.peak_flops"."""

    @property
    def is_measured(self) -> bool:
        return self.source.startswith("measured")


def find_peak(
    device: torch.device, dtype: torch.dtype, peak_flops: float | None = None, tf32: bool = False
) -> Peak:
    """The peak of one `device` for matmuls in `dtype`; `peak_flops` is the config's `metrics.peak_flops`.

    `tf32`: whether fp32 matmuls may use TF32. float8 dtypes are looked up as "float8"; a device without such
    units multiplies in bfloat16, so that is what is measured there.

    Raises ValueError when `peak_flops` is not positive.
    """
    if peak_flops is not None:
        if not peak_flops > 0:
            raise ValueError(f"metrics.peak_flops = {peak_flops}: give the FLOP/s of one device, e.g. 989e12")
        return Peak(float(peak_flops), "set by metrics.peak_flops")

    is_float8 = str(dtype).startswith("torch.float8")
    if device.type == "cuda":
        known = find_device(torch.cuda.get_device_name(device))
        dtype_name = "float8" if is_float8 else str(dtype).removeprefix("torch.")
        table_peak = known.peak_flops(dtype_name, tf32) if known is not None else None
        if known is not None and table_peak is not None:
            units = "tf32" if tf32 and dtype == torch.float32 else dtype_name
            return Peak(table_peak, f"table: {known.name}, {units}")
    return measure_peak(device, torch.bfloat16 if is_float8 else dtype)


def measure_peak(
    device: torch.device, dtype: torch.dtype, threads: int | None = None, budget: float = 0.5
) -> Peak:
    """Times square matmuls of growing size and takes the best rate seen.

    `threads`: CPU threads to use; None: as many as torch uses now. `budget`: seconds of timing; a size is not
    tried when one product of it is expected to take a fifth of that. The best rate counts, not the mean:
    other load on the machine can only slow a product down.

    Raises ValueError for a dtype torch has no plain matmul for.
    """
    if dtype not in MEASURED_DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in MEASURED_DTYPES)
        raise ValueError(f"cannot measure a matmul peak in {dtype}; measured are: {names}")
    on_cpu = device.type == "cpu"
    threads_before = torch.get_num_threads()
    if on_cpu and threads is not None:
        torch.set_num_threads(threads)
    try:
        used = torch.get_num_threads()
        largest = 2048 if on_cpu else 8192
        best = _best_matmul_rate(device, dtype, largest, budget)
    finally:
        torch.set_num_threads(threads_before)
    how = f"{str(dtype).removeprefix('torch.')} matmul"
    if on_cpu:
        how += f", {used} CPU thread{'s' if used > 1 else ''}"
    return Peak(best, f"measured on this device ({how})")


def _best_matmul_rate(device: torch.device, dtype: torch.dtype, largest: int, budget: float) -> float:
    """Best FLOP/s over sizes 256, 512, ... `largest`, within about `budget` seconds."""
    generator = torch.Generator(device).manual_seed(0)  # its own: the run's random state stays untouched
    _fastest_square(256, device, dtype, generator, seconds=0.0)  # loads the library, outside the budget
    best = 0.0
    deadline = time.perf_counter() + budget
    size = 256
    while True:
        share = (deadline - time.perf_counter()) / 3  # of the time left; the rest is for larger sizes
        seconds = _fastest_square(size, device, dtype, generator, share)
        best = max(best, 2 * size**3 / seconds)
        expected = 8 * seconds
        if size >= largest or expected > budget / 5 or time.perf_counter() + 2 * expected > deadline:
            return best
        size *= 2


def _fastest_square(
    size: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator, seconds: float
) -> float:
    """Seconds of the fastest (size, size) x (size, size) product, of 1 to 50 within `seconds`."""
    # random values: constant ones flip fewer bits, draw less power and flatter the clock
    a = torch.rand(size, size, device=device, generator=generator).to(dtype)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)  # chooses the kernel and touches the pages
    fastest = float("inf")
    until = time.perf_counter() + seconds
    for _ in range(50):
        _wait(device)
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        _wait(device)
        end = time.perf_counter()
        fastest = min(fastest, end - start)
        if end > until:
            break
    return max(fastest, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
