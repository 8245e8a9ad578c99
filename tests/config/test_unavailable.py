"""Keys of the field that are refused by name, with a sentence why."""

from __future__ import annotations

import pytest

from titan5d.config.schema import Config
from titan5d.config.unavailable import unavailable

# a key, a value that asks for what is not there, and why it is not
UNAVAILABLE: dict[str, tuple[str, object, str]] = {
    "fault tolerance": ("fault_tolerance.enable", True, "restarts continue from checkpoints"),
    "semi-sync": ("fault_tolerance.semi_sync_method", "diloco", "change what is learned"),
    "memory estimation": ("memory_estimation.enable", True, "leave it out"),
    "memory estimation for real": ("memory_estimation.disable_fake_mode", True, "leave it out"),
    "imports": ("experimental.custom_import", "a.b", "no code is loaded by name"),
    "arguments": ("experimental.custom_args_module", "a.b", "no code is loaded by name"),
    "a config class": ("job.custom_config_module", "a.b", "no code is loaded by name"),
    "a fake world": ("comm.mode", "fake_backend", "only 'default' trains"),
    "metrics of all ranks": ("metrics.save_for_all_ranks", True, "one rank writes"),
    "a step in backward": ("optimizer.early_step_in_backward", True, "cannot be clipped"),
    "worker processes": ("training.dataloader.num_workers", 2, "only 0"),
    "validation workers": ("validation.dataloader.num_workers", 2, "only 0"),
    "workers that stay": ("training.dataloader.persistent_workers", True, "only false"),
    "validation workers that stay": ("validation.dataloader.persistent_workers", True, "only false"),
    "other dispatch": ("parallelism.expert_parallel_comm_backend", "deepep", "only 'standard'"),
    "low precision of experts": ("quantize.grouped_mm.float8.fqns", ["experts"], "stay in the type of the model"),
    "quantized weights": (
        "checkpoint.initial_load_in_hf_quantized",
        True,
        "start from the unquantized model",
    ),
}


@pytest.mark.parametrize("name", UNAVAILABLE)
def test_what_is_not_there_is_refused_by_name(name: str) -> None:
    path, value, why = UNAVAILABLE[name]
    *sections, key = path.split(".")
    config = Config()
    section: object = config
    for part in sections:
        section = getattr(section, part)
    assert unavailable(config) == []
    setattr(section, key, value)
    (problem,) = unavailable(config)
    assert key in problem or "memory_estimation.*" in problem
    assert why in problem
