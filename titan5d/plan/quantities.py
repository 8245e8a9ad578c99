"""Bytes, rates and times as people write them: "450GB/s" read, 1.2 GiB and 34 ms written. Pure Python."""

from __future__ import annotations

import re

from titan5d.hardware import GIB

_PREFIXES = {
    "": 1.0,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "KI": 2.0**10,
    "MI": 2.0**20,
    "GI": 2.0**30,
    "TI": 2.0**40,
}
_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([KMGTkmgt]?i?)(B|b|bit)(?:/s|ps)\s*")


def parse_bandwidth(text: str) -> float:
    """`450GB/s`, `400Gb/s`, `25GiB/s` -> bytes/s. B is a byte, b or bit a bit; G is 10^9, Gi is 2^30.

    Raises ValueError saying what cannot be read.
    """
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no bandwidth: write a number and a unit, 450GB/s (bytes) or 400Gb/s (bits); of one GPU and"
            " one direction"
        )
    number, prefix, unit = match.groups()
    rate = float(number) * _PREFIXES[prefix.upper()] / (1 if unit == "B" else 8)
    if rate <= 0:
        raise ValueError(f"{text!r} is no bandwidth: it must be above 0")
    return rate


def gib(size: float) -> str:
    """Bytes as GiB, two decimals."""
    return f"{size / GIB:.2f} GiB"


def short_bytes(size: float) -> str:
    """Bytes with the decimal unit that fits: 1.3 MB, 410 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(size) < 1000 or unit == "PB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"


def short_time(seconds: float) -> str:
    """Seconds with the unit that fits: 12 us, 3.4 ms, 2.1 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"


def rate(bytes_per_second: float) -> str:
    """Bytes/s as GB/s."""
    return f"{bytes_per_second / 1e9:g} GB/s"
