"""The C allocator of a rank that trains on the CPU."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
LARGEST_KEPT = 2**30


def keep_freed_memory() -> bool:
    """Keeps freed tensors' memory for the next ones, as torch does on GPUs. Returns whether this C library can.

    By default glibc hands blocks of more than a few MiB back to the kernel, which maps and clears the same pages again
    for every activation: several percent of a training step. The peak stays what it was, within a few percent.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc: musl, macOS, Windows
        return False
    # Setting one threshold ends glibc's own tuning of both, so both are set
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
