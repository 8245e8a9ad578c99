"""Rates as people write them, and what is said when they cannot be read."""

from __future__ import annotations

import pytest

from titan5d.plan.quantities import parse_bandwidth, short_bytes, short_time


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("450GB/s", 450e9),
        ("400Gb/s", 50e9),
        ("400 Gbit/s", 50e9),
        ("400Gbps", 50e9),
        ("1.5TB/s", 1.5e12),
        ("25GiB/s", 25 * 2**30),
        ("1e3MB/s", 1e9),
    ],
)
def test_bits_and_bytes(text: str, rate: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["450", "450GB", "GB/s", "-5GB/s", "0GB/s", "450 Gx/s", "fast", ""])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is no bandwidth"):
        parse_bandwidth(text)


def test_units_are_chosen_by_size() -> None:
    assert [short_bytes(n) for n in (12, 1_300_000, 4.1e11)] == ["12 B", "1.3 MB", "410 GB"]
    assert [short_time(t) for t in (1.2e-5, 0.034, 2.1)] == ["12 us", "34 ms", "2.1 s"]
