"""Peaks of the process on a CPU against memory this test takes itself; CUDA's fields by name."""

import mmap
import sys

import pytest
import torch

from titan5d.hardware import host_memory_limit
from titan5d.metrics.memory import GIB, MemoryMonitor

MIB = 1024**2

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def touch(size):
    """A block of `size` bytes, every page written, that goes back to the system when closed."""
    block = mmap.mmap(-1, size)
    for page in range(0, size, mmap.PAGESIZE):
        block[page] = 1
    return block


@needs_proc
def test_peak_sees_memory_that_is_gone_again():
    monitor = MemoryMonitor(torch.device("cpu"))
    before = monitor.snapshot()
    block = touch(256 * MIB)
    held = monitor.snapshot()
    block.close()
    after = monitor.snapshot()
    assert held.current - before.current == pytest.approx(256 * MIB, abs=16 * MIB)
    assert after.current - before.current == pytest.approx(0, abs=16 * MIB)
    assert after.peak >= before.current + 240 * MIB
    assert after.peak >= after.current


@needs_proc
def test_reset_starts_a_new_peak():
    monitor = MemoryMonitor(torch.device("cpu"))
    touch(256 * MIB).close()
    high = monitor.snapshot().peak
    monitor.reset_peak()
    low = monitor.snapshot()
    assert high - low.peak > 200 * MIB
    assert low.peak - low.current < 16 * MIB


def test_names_and_units():
    snapshot = MemoryMonitor(torch.device("cpu")).snapshot()
    metrics = snapshot.metrics()
    assert set(metrics) == {"memory_peak_gib", "memory_peak_percent", "memory_current_gib"}
    assert metrics["memory_peak_gib"] == snapshot.peak / GIB
    assert metrics["memory_peak_percent"] == pytest.approx(100 * snapshot.peak / snapshot.total)
    assert 0.05 < metrics["memory_peak_gib"] < 50
    assert 0 < metrics["memory_peak_percent"] <= 100


@needs_proc
def test_limit_is_that_of_the_machine_or_less():
    with open("/proc/meminfo") as meminfo:
        machine = int(meminfo.readline().split()[1]) * 1024  # MemTotal: N kB
    assert 64 * MIB < host_memory_limit() <= machine * 1.001


def test_cuda_statistics_have_their_names(monkeypatch):
    """What the allocator reports, reserved against active, without needing a GPU."""
    stats = {
        "reserved_bytes.all.peak": 12 * GIB,
        "active_bytes.all.peak": 10 * GIB,
        "num_alloc_retries": 2,
        "num_ooms": 1,
    }
    properties = type("Properties", (), {"total_memory": 80 * GIB})
    resets = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    device = torch.device("cuda:1")
    monitor = MemoryMonitor(device)
    assert resets == [device]
    assert monitor.snapshot().metrics() == {
        "memory_peak_gib": 12,
        "memory_peak_percent": 15,
        "memory_active_gib": 10,
        "memory_active_percent": 12.5,
        "memory_alloc_retries": 2,
        "memory_ooms": 1,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_peak_of_a_real_tensor():
    device = torch.device("cuda:0")
    monitor = MemoryMonitor(device)
    before = monitor.snapshot().active_peak
    tensor = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    del tensor
    snapshot = monitor.snapshot()
    assert snapshot.active_peak - before == 256 * MIB
    assert snapshot.peak >= snapshot.active_peak
