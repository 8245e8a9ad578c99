"""Whether a run fits, and the least ZeRO stage that does: decided by numbers, and once for all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from titan5d.config.check import Layout, check
from titan5d.config.schema import Config
from titan5d.launch.local_ranks import run_ranks
from titan5d.launch.run import settle_zero_stage
from titan5d.models.args import ModelArgs
from titan5d.plan import fits
from titan5d.plan.fits import FILL, GIB, least_zero_stage, memory_problems, peak_bytes

ARGS = ModelArgs(dim=512, n_layers=8, n_heads=8, n_kv_heads=4, ffn_dim=1024, vocab_size=1024)
CPU = torch.device("cpu")


def config_of(global_batch_size: int = 32) -> Config:
    config = Config()
    config.training.seq_len = 16
    config.training.local_batch_size = 2
    config.training.global_batch_size = global_batch_size
    return config


def needs(config: Config, layout: Layout, device_type: str = "cpu") -> dict[int, float]:
    return {
        stage: peak_bytes(config, ARGS, replace(layout, zero_stage=stage), device_type) for stage in (1, 2, 3)
    }


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch):
    """Sets the bytes that the machine has."""

    def set_memory(size: float) -> None:
        monkeypatch.setattr(fits, "host_memory_limit", lambda: size)

    return set_memory


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_least_stage_that_fits_is_chosen(stage: int, memory) -> None:
    config = config_of()
    layout = check(config, ARGS, 4)
    need = needs(config, layout)
    assert need[1] > need[2] > need[3]
    just_enough = 4 * need[stage] / FILL  # four ranks share the machine
    memory(just_enough)
    chosen, why = least_zero_stage(config, ARGS, layout, "cpu", 4)
    assert chosen == stage
    memory(just_enough * 0.999)
    assert least_zero_stage(config, ARGS, layout, "cpu", 4)[0] == min(stage + 1, 3)
    assert f"zero_stage {stage}" in why and f"stage {stage} needs {need[stage] / GIB:.2f} GiB" in why
    assert "80% of what a rank has on this machine (4 CPU ranks)" in why
    assert "\n" not in why


def test_without_accumulation_stages_1_and_2_need_the_same() -> None:
    config = config_of(global_batch_size=8)
    need = needs(config, check(config, ARGS, 4))
    assert need[1] == need[2] > need[3]


def test_offloaded_state_takes_no_room_on_the_device() -> None:
    config = config_of(global_batch_size=8)
    layout = check(config, ARGS, 4)
    without = needs(config, layout, "cuda")
    config.training.enable_cpu_offload = True
    offloaded = needs(config, layout, "cuda")
    assert all(offloaded[stage] < without[stage] for stage in without)
    assert needs(config, layout, "cpu") == without  # here it is the same memory


def test_recompute_lowers_the_need() -> None:
    need = []
    for mode, option in (("none", "op"), ("selective", "4"), ("selective", "op"), ("full", "op")):
        config = config_of()
        config.training.seq_len = 1024
        config.activation_checkpoint.mode = mode  # type: ignore[assignment]
        config.activation_checkpoint.selective_ac_option = option
        need.append(peak_bytes(config, ARGS, check(config, ARGS, 4), "cpu"))
    assert need == sorted(need, reverse=True) and len(set(need)) == 4


def test_a_run_is_refused_when_not_even_stage_3_fits(memory) -> None:
    config = config_of()
    layout = check(config, ARGS, 4)
    need = needs(config, layout)
    memory(4 * need[3])
    assert memory_problems(config, ARGS, layout, "cpu", 4) == []
    memory(4 * need[3] * 0.999)
    (problem,) = memory_problems(config, ARGS, layout, "cpu", 4)
    for part in (
        "model.flavor",
        "zero_stage 3",
        "dp_shard 4",
        f"{need[3] / GIB:.1f} GiB",
        "this machine (4 CPU ranks)",
    ):
        assert part in problem
    config.parallelism.zero_stage = 1  # asked for: it must fit itself
    (problem,) = memory_problems(config, ARGS, check(config, ARGS, 4), "cpu", 4)
    assert "zero_stage 1" in problem


def _settled(sizes: list[float], stage_asked: int | None) -> int:
    config = config_of(global_batch_size=16)
    config.parallelism.zero_stage = stage_asked  # type: ignore[assignment]
    fits.host_memory_limit = lambda: sizes[dist.get_rank()]
    layout = check(config, ARGS, 2)
    return settle_zero_stage(config, ARGS, layout, CPU, 1).zero_stage


def test_ranks_agree_on_the_stage_of_rank_0() -> None:
    config = config_of(global_batch_size=16)
    need = needs(config, check(config, ARGS, 2))
    much, little = need[1] / FILL, need[3] / FILL
    assert run_ranks(_settled, 2, [much, little], None) == [1, 1]
    assert run_ranks(_settled, 2, [little, much], None) == [3, 3]
    assert run_ranks(_settled, 2, [little, little], 2) == [2, 2]  # asked for: nothing to decide
