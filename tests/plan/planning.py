"""What the planner's tests share: a config from a few keys, planned on a machine."""

from __future__ import annotations

from typing import Any

from titan5d.config.check import check
from titan5d.config.schema import Config
from titan5d.hardware import find_device
from titan5d.models.families import model_args
from titan5d.plan.assumptions import assumptions_of
from titan5d.plan.case import Case, case_of
from titan5d.plan.network import Network
from titan5d.plan.plan_run import plan_run
from titan5d.plan.predict import Machine, Prediction


def config_with(keys: dict[str, Any]) -> Config:
    """A default config with dotted keys set."""
    config = Config()
    for key, value in keys.items():
        section, _, name = key.partition(".")
        assert hasattr(getattr(config, section), name), key
        setattr(getattr(config, section), name, value)
    return config


def machine_of(gpu: str, gpus: int, settings: tuple[str, ...] = (), **network: Any) -> Machine:
    device = find_device(gpu)
    assert device is not None
    assumptions = assumptions_of(device).with_values(list(settings))
    return Machine(device, gpus, Network.of(device, assumptions, **network), assumptions)


def planned(gpu: str, gpus: int, keys: dict[str, Any], settings: tuple[str, ...] = ()) -> Prediction:
    return plan_run(config_with(keys), machine_of(gpu, gpus, settings))[0]


def case_with(ranks: int, keys: dict[str, Any]) -> Case:
    config = config_with(keys)
    args = model_args(config.model, config.moe)
    return case_of(config, args, check(config, args, ranks))
