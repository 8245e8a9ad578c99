"""Where the peak comes from, and that the measured one is neither a default nor far off."""

import time

import pytest
import torch

from titan5d.metrics.calibrate import Peak, find_peak, measure_peak

CPU = torch.device("cpu")
CUDA = torch.device("cuda")  # never used for work here: the device name is given by the test


def pretend(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)


def test_config_goes_before_everything(monkeypatch):
    pretend(monkeypatch, "NVIDIA H200")
    for device in (CPU, CUDA):
        assert find_peak(device, torch.bfloat16, 1e12) == Peak(1e12, "set by metrics.peak_flops")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_config_value_that_is_no_peak_is_refused(value):
    with pytest.raises(
        ValueError, match=r"metrics.peak_flops = .*give the FLOP/s of one device, e.g. 989e12"
    ):
        find_peak(CPU, torch.bfloat16, value)


def test_known_device_takes_the_table(monkeypatch):
    pretend(monkeypatch, "NVIDIA H100 80GB HBM3")
    assert find_peak(CUDA, torch.bfloat16) == Peak(989e12, "table: h100-80g, bfloat16")
    assert find_peak(CUDA, torch.bfloat16, tf32=True) == Peak(989e12, "table: h100-80g, bfloat16")
    assert find_peak(CUDA, torch.float32) == Peak(67e12, "table: h100-80g, float32")
    assert find_peak(CUDA, torch.float32, tf32=True) == Peak(494.5e12, "table: h100-80g, tf32")
    assert find_peak(CUDA, torch.float8_e4m3fn) == Peak(1979e12, "table: h100-80g, float8")
    assert not find_peak(CUDA, torch.bfloat16).is_measured


@pytest.mark.parametrize(
    ("name", "dtype", "measured_in"),
    [
        ("Some GPU of tomorrow", torch.bfloat16, torch.bfloat16),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, torch.bfloat16),  # known, but without bf16 units
        ("NVIDIA A100-SXM4-80GB", torch.float8_e4m3fn, torch.bfloat16),  # known, but without fp8 units
    ],
)
def test_device_without_a_table_entry_is_measured(monkeypatch, name, dtype, measured_in):
    pretend(monkeypatch, name)
    measured = Peak(1.0, "measured on this device (test)")
    asked = []

    def fake_measure(device, dtype):
        asked.append((device, dtype))
        return measured

    monkeypatch.setattr("titan5d.metrics.calibrate.measure_peak", fake_measure)
    assert find_peak(CUDA, dtype) is measured
    assert asked == [(CUDA, measured_in)]


def test_measures_this_cpu():
    start = time.perf_counter()
    peak = find_peak(CPU, torch.float32)
    assert time.perf_counter() - start < 5  # half a second on an idle machine
    threads = torch.get_num_threads()
    named = f"{threads} CPU thread{'s' if threads > 1 else ''}"
    assert peak.is_measured
    assert peak.source == f"measured on this device (float32 matmul, {named})"


def best_rate_of_plain_products():
    a, b = torch.rand(512, 512), torch.rand(512, 512)
    rates = []
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        rates.append(512 * 512 * (512 + 512) / (time.perf_counter() - start))  # multiplications and additions
    return max(rates)


def test_measured_peak_is_the_rate_of_a_matmul():
    """Other load on the machine can halve one timing, so the closest of a few tries counts."""
    ratios = []
    for _ in range(8):
        ratios.append(
            measure_peak(CPU, torch.float32, budget=0.2).flops_per_second / best_rate_of_plain_products()
        )
        if 0.8 < ratios[-1] < 1.5:
            return
    pytest.fail(f"measured peak over the rate of plain products: {ratios}")


def test_leaves_threads_and_random_state_alone():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    peak = measure_peak(CPU, torch.float32, threads=threads + 1, budget=0.02)
    assert f"{threads + 1} CPU threads" in peak.source
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_dtype_without_a_matmul_is_refused():
    with pytest.raises(
        ValueError, match=r"cannot measure a matmul peak in torch.int64; measured are: float32"
    ):
        measure_peak(CPU, torch.int64)
