"""Counting GPUs and cores without torch, against stand-ins for the driver's files and programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from titan5d.launch import devices
from titan5d.launch.devices import count_cores, count_gpus, torch_build


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    lines = "".join(f"GPU {i}: Some Card (UUID: GPU-{i})\\n  MIG 1g.10gb Device 0\\n" for i in range(4))
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("0,-1,2", 1), ("0,1,2,3,4,5", 4), ("GPU-a,GPU-b,GPU-c", 3)],
)
@pytest.mark.usefixtures("four_gpus")
def test_gpus_less_those_hidden(visible: str | None, expected: int):
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_no_driver_no_gpus_whatever_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(devices, "_amd_gpus", lambda: 0)
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0


def test_a_driver_that_fails_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'has failed because it could not communicate with the driver'; exit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(devices, "_amd_gpus", lambda: 0)
    assert count_gpus({}) == 0


def test_amd_nodes_with_an_id_are_gpus(tmp_path: Path):
    for node, gpu_id in enumerate(("0", "0", "51234", "61234")):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "gpu_id").write_text(gpu_id + "\n")
    assert devices._amd_gpus(tmp_path) == 2


def test_torch_build_is_what_torch_says_of_itself():
    assert torch_build() == (torch.__version__, torch.version.cuda is not None or torch.version.hip is not None)


@pytest.mark.parametrize(("cuda", "gpu"), [("'13.0'", True), ("None", False)])
def test_torch_build_reads_the_version_file(cuda: str, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    lines = ("__version__ = '2.11.0+x'", f"cuda: Optional[str] = {cuda}", "hip: Optional[str] = None")
    (package / "version.py").write_text("\n".join(lines))
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert torch_build() == ("2.11.0+x", gpu)


def test_cores_are_at_most_what_the_quota_pays_for(tmp_path: Path):
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = tmp_path / "cpu.max"
    for text, expected in (("max 100000", usable), ("100000 100000", 1), ("50000 100000", 1), ("junk", usable)):
        quota.write_text(text + "\n")
        assert count_cores(quota) == expected
    assert count_cores(tmp_path / "absent") == usable
