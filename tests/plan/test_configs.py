"""Every file in train_configs/ says what hardware it is for, and fits on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.planning import machine_of
from titan5d.config.load import load_config
from titan5d.hardware import DEVICES
from titan5d.plan.assumptions import CHECKED, assumptions_of
from titan5d.plan.plan_run import plan_run
from titan5d.plan.stated import stated_hardware

CONFIGS = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_it_fits_on_the_hardware_it_states(path: Path) -> None:
    stated = stated_hardware(path)
    assert stated is not None, f"{path.name} has no line `# Hardware: N x GPU`"
    gpus, gpu = stated
    found, _ = plan_run(load_config(["--config", str(path)], []), machine_of(gpu, gpus))
    assert found.fullest.total <= 0.9 * found.machine.device.memory


def test_the_line_is_found_only_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("# Hardware: 2,048 x h200 and more\n")
    assert stated_hardware(path) == (2048, "h200")
    path.write_text("# hardware of any kind\n")
    assert stated_hardware(path) is None


def test_every_device_has_assumptions() -> None:
    for device in DEVICES:
        assert 0 < assumptions_of(device).gemm <= 1
    assert set(CHECKED) <= {device.name for device in DEVICES}
