"""The device table: published peaks, both ways to name a device, no answer for an unknown one."""

import re

import pytest

from titan5d.hardware import DEVICES, device_names, find_device


@pytest.mark.parametrize(
    ("short", "torch_name", "bf16_tflops"),
    [
        ("a100-40g", "NVIDIA A100-SXM4-40GB", 312),
        ("a100-80g", "NVIDIA A100-SXM4-80GB", 312),
        ("a100-pcie-80g", "NVIDIA A100 80GB PCIe", 312),
        ("h100-80g", "NVIDIA H100 80GB HBM3", 989),
        ("h100-pcie", "NVIDIA H100 PCIe", 756),
        ("h100-nvl", "NVIDIA H100 NVL", 835),
        ("h200", "NVIDIA H200", 989),
        ("l40s", "NVIDIA L40S", 362),
        ("b200", "NVIDIA B200", 2250),
        ("gb200", "NVIDIA GB200", 2500),
        ("mi300x", "AMD Instinct MI300X", 1307),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_published_peak_by_either_name(short, torch_name, bf16_tflops):
    device = find_device(short)
    assert device is not None
    assert device is find_device(torch_name)
    assert device is find_device(torch_name.upper())
    assert device.peak_flops("bfloat16") == bf16_tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "NVIDIA",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of the card
        "NVIDIA H200 NVL",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA GB200 Grace",
    ],
)
def test_unknown_device_is_none(name):
    assert find_device(name) is None


def test_what_a_device_does_not_have_is_none():
    a100, v100, h100 = find_device("a100-80g"), find_device("v100-32g"), find_device("h100-80g")
    assert a100.peak_flops("float8") is None
    assert v100.peak_flops("bfloat16") is None
    assert v100.peak_flops("float16") == 125e12
    assert h100.peak_flops("float32") == 67e12
    assert h100.peak_flops("float32", tf32=True) == 494.5e12
    assert v100.peak_flops("float32", tf32=True) == 15.7e12  # no TF32 units: the setting changes nothing
    with pytest.raises(
        ValueError, match=re.escape("dtype 'int8'; known: bfloat16, float16, float32, float8")
    ):
        h100.peak_flops("int8")


def test_names_are_unique():
    names = [name.lower() for device in DEVICES for name in (device.name, *device.torch_names)]
    assert len(names) == len(set(names))
    assert device_names() == tuple(device.name for device in DEVICES)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_figures_are_in_their_units(device):
    """A TFLOP/s, GB or bit/s mistake is a factor of 8, 1e3 or more."""
    assert 1e13 <= device.fp16_flops <= 1e16
    assert device.fp32_flops <= device.fp16_flops
    assert device.fp8_flops is None or 1.99 <= device.fp8_flops / device.bf16_flops <= 2.03
    assert 2e10 <= device.memory <= 3e11
    assert 5e11 <= device.memory_bandwidth <= 1e13
    # training cards do 20 to 500 FLOPs in the time they load a byte
    assert 20 <= device.fp16_flops / device.memory_bandwidth <= 500
    assert 1e9 <= device.inter_node_bandwidth <= device.intra_node_bandwidth <= device.memory_bandwidth
    assert 1e-6 <= device.intra_node_latency < device.inter_node_latency * 1.01 <= 1e-4
