"""The search finds what trying everything would find, says why, and writes what training takes."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.plan.planning import config_with, machine_of
from titan5d.config.check import check
from titan5d.config.load import ConfigError
from titan5d.config.schema import Config
from titan5d.models.families import model_args
from titan5d.plan.explain import search_text, why
from titan5d.plan.layouts import Priors, degrees
from titan5d.plan.plan_run import plan_run
from titan5d.plan.predict import predict
from titan5d.plan.search import final_config, search


def base(flavor: str = "70B", seq: int = 8192, batch: int = 1024, family: str = "llama3") -> Config:
    return config_with(
        {
            "model.name": family,
            "model.flavor": flavor,
            "training.seq_len": seq,
            "training.global_batch_size": batch,
            "compile.enable": True,
        }
    )


def test_floors_leave_the_ranking_as_it_is() -> None:
    machine = machine_of("h100-80g", 64)
    result = search(base(), machine, Priors(max_tp=8), top=5)
    played = sorted(predict(one.case, machine).time.total for one in result.fitting)[:5]
    assert [found.time.total for _, found in result.best] == pytest.approx(played)
    for one in result.fitting[::10]:
        assert one.floor <= predict(one.case, machine).time.total * (1 + 1e-9)


@pytest.mark.parametrize(
    ("family", "flavor", "gpus"), [("llama3", "70B", 64), ("llama3", "8B", 8), ("qwen3", "30B-A3B", 32)]
)
def test_what_is_found_is_legal_fits_and_is_as_fast_as_said(family: str, flavor: str, gpus: int) -> None:
    machine, config = machine_of("h100-80g", gpus), base(flavor, family=family)
    result = search(config, machine, Priors(max_tp=8), top=3)
    args = model_args(config.model, config.moe)
    for layout, found in result.best:
        again, _ = plan_run(final_config(config, layout, args), machine)  # raises what training would refuse
        assert again.fits and again.fullest.total <= 0.9 * machine.device.memory
        # the whole table instead of its beginning
        assert again.time.total == pytest.approx(found.time.total, rel=5e-3)
        assert again.fullest.total == pytest.approx(found.fullest.total, rel=1e-3)
        assert again.tokens == 1024 * 8192


def test_priors_bound_the_search_and_flags_lift_them() -> None:
    rejected: Counter[str] = Counter()
    config, args = base(), model_args(base().model, base().moe)
    tried = list(degrees(config, args, 64, 8, Priors(max_tp=8), rejected))
    assert all(one.tp <= 8 and one.cp == 1 for one in tried) and any(one.dp_replicate > 1 for one in tried)
    assert all(key.startswith(("prior", "refused", "training")) for key in rejected)
    free = Priors(max_tp=64, cp_from=0, hsdp_nodes=(1, 1))
    more = list(degrees(config, args, 64, 8, free, Counter()))
    assert any(one.tp > 8 for one in more) and any(one.cp > 1 for one in more)
    assert not any(one.dp_replicate > 1 for one in more)
    for one in more:
        assert one.world_size == 64


def test_slices_of_experts_are_tried_when_asked_for() -> None:
    machine, config = machine_of("h100-80g", 32), base("30B-A3B", family="qwen3", batch=256)
    args = model_args(config.model, config.moe)
    whole, sliced = (
        list(degrees(config, args, 32, 8, Priors(max_tp=8, max_etp=most), Counter())) for most in (1, 4)
    )
    assert {one.etp for one in whole} == {1} and {one.etp for one in sliced} == {1, 2, 4}
    assert [one for one in sliced if one.etp == 1] == whole
    result = search(config, machine, Priors(max_tp=8, max_etp=4), top=1)
    assert any(one.layout.topology.etp > 1 for one in result.fitting)
    found = next(one for one in result.fitting if one.layout.topology.etp > 1)
    again, _ = plan_run(final_config(config, found.layout, args), machine)  # raises what training would refuse
    assert again.fits and again.fullest.total == pytest.approx(found.memory, rel=1e-3)


def test_long_rows_are_cut() -> None:
    result = search(base("8B", seq=131072, batch=64), machine_of("h100-80g", 64), Priors(max_tp=8), top=1)
    assert result.best[0][0].topology.cp > 1


def test_the_winner_is_explained() -> None:
    machine = machine_of("h100-80g", 64)
    result = search(base(), machine, Priors(max_tp=8), top=3)
    said = why(result, machine)
    assert any(line.startswith("tensor degree") for line in said)
    assert all("slower" in line for line in said)
    text = search_text(result, machine, Priors(max_tp=8), 1.0)
    for part in ("rules of thumb", "why the first", "not ranked", "does not fit", "--max-tp"):
        assert part in text


def test_nothing_fits_is_said_with_what_comes_nearest() -> None:
    machine = machine_of("rtx4090", 8)
    result = search(base("405B"), machine, Priors(max_tp=8))
    assert not result.best and result.nearest is not None
    assert "no layout fits" in search_text(result, machine, Priors(max_tp=8), 0.1)


def test_a_search_keeps_what_is_learned() -> None:
    with pytest.raises(ConfigError, match="global_batch_size must be set"):
        search(base(batch=-1), machine_of("h200", 8), Priors(max_tp=8))


def test_the_bound_on_memory_leaves_out_nothing() -> None:
    """Of alike ranks one is computed, and no rank beyond what is too much: what fits is as full as all ranks say."""
    machine = machine_of("h100-80g", 64)
    result = search(base("30B-A3B", family="qwen3", batch=128), machine, Priors(max_tp=8, pp_from=0), top=1)
    for one in result.fitting[::25]:
        assert one.memory == pytest.approx(predict(one.case, machine).fullest.total, rel=1e-12)
    assert {one.case.topology.pp for one in result.fitting} > {1, 2}


def test_a_thousand_gpus_take_seconds_for_experts_too() -> None:
    start = time.process_time()
    config = base("671B", seq=4096, batch=15360, family="deepseek_v3")
    result = search(config, machine_of("h100-80g", 1024), Priors(max_tp=8))
    assert time.process_time() - start < 10
    assert result.tried > 10_000 and result.best[0][0].topology.ep > 1


def test_a_thousand_gpus_take_seconds() -> None:
    start = time.process_time()
    config = base("405B", batch=2048)
    result = search(config, machine_of("h100-80g", 1024), Priors(max_tp=8))
    assert time.process_time() - start < 10
    layout, _ = result.best[0]
    assert layout.topology.tp == 8 and layout.topology.pp > 1
    check(
        final_config(config, layout, model_args(config.model, config.moe)),
        model_args(config.model, config.moe),
        1024,
    )
