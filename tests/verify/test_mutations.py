"""Each cut is broken on purpose, by the factors and sums that such code gets wrong, and verify sees every one.

The reference is computed before anything is broken; two ranks each. Named are the columns in which it must show.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import titan5d.parallel.apply as apply
import titan5d.parallel.expert as expert
import titan5d.parallel.tensor as tensor
import titan5d.parallel.vocab_parallel as vocab_parallel
import titan5d.train.routing as routing
import titan5d.train.step as step
from titan5d.config.load import load_config
from titan5d.models.decoder import NoCopies
from titan5d.models.router import Router
from titan5d.parallel.data import before_microbatch
from titan5d.topology import Topology
from titan5d.verify.compare import Outcome
from titan5d.verify.layouts import Cuts, parse_layout, parse_layouts
from titan5d.verify.run import run_layout, run_reference
from titan5d.verify.shrink import Small, shrink

Patch = Callable[[pytest.MonkeyPatch], None]
EXPERT_FLAGS = [
    "--config",
    "moe_debug",
    "--moe.bias_update_rate",
    "0.001",
    "--activation_checkpoint.mode",
    "full",
]


@pytest.fixture(scope="module")
def dense() -> tuple[Small, Outcome]:
    small = shrink(load_config(["--config", "quickstart"]), parse_layouts("dp2, tp2, cp2, pp2"))
    return small, run_reference(small)


@pytest.fixture(scope="module")
def experts() -> tuple[Small, Outcome]:
    small = shrink(load_config(EXPERT_FLAGS), parse_layouts("dp2ep2"))
    return small, run_reference(small)


def replace(module: Any, name: str, change: Callable[[Any], Any]) -> Patch:
    """A patch that sets module.name to change(what it was)."""
    return lambda monkeypatch: monkeypatch.setattr(module, name, change(getattr(module, name)))


def doubled_gradient(values: torch.Tensor) -> torch.Tensor:
    return values + (values - values.detach())


def half_vocabulary_gradient(whole: Any) -> Any:
    def changed(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        losses = whole(logits, *args, **kwargs)
        logits.div_(2)  # by now the gradient
        return losses

    return changed


def without_last(whole: Any) -> Any:
    def changed(model: Any, batches: Any, *more: Any) -> Any:
        loss_sum, row_sums = whole(model, batches[:-1], *more)
        return loss_sum, torch.cat([row_sums, torch.zeros(len(batches[-1].tokens))])

    return changed


def every_eighth_is_lost(whole: Any) -> Any:
    """A step of the pipeline has eight micro-batches."""
    calls = count(1)

    def changed(part: torch.Tensor, valid_targets: int) -> torch.Tensor:
        return whole(part, valid_targets) * (next(calls) % 8 > 0)

    return changed


def one_rank_clips_otherwise(whole: Any) -> Any:
    return lambda parameters, norm, most: whole(parameters, norm * (1 + int(os.environ["RANK"])), most)


def all_reduces_nothing(model: Any, stage: int, last: bool) -> None:
    model.gradient_sum = NoCopies()
    before_microbatch(model, stage, last)
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)


def local_count(whole: Any) -> Any:
    return lambda batches, group, device: whole(
        batches,
        torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True),
        device,
    )


def twice(whole: Any) -> Any:
    def changed(self: Router) -> None:
        whole(self)
        whole(self)

    return changed


DENSE: dict[str, tuple[str, Patch, set[str]]] = {
    "data: averaged over ranks instead of summed": (
        "dp2",
        replace(FSDPModule, "set_gradient_divide_factor", lambda whole: lambda self, _: whole(self, 2.0)),
        {"norm"},
    ),
    "data: gradients stay on their rank": (
        "dp2z0",
        replace(step, "before_microbatch", lambda _: all_reduces_nothing),
        {"gradients", "norm"},
    ),
    "data: both ranks read the same rows": (
        "dp2",
        replace(Topology, "dp_rank", lambda _: lambda self, rank: 0),
        {"loss", "gradients"},
    ),
    "data: each rank divides by its own count": (
        "dp2",
        replace(step, "count_step", local_count),
        {"norm", "metrics"},
    ),
    "data: the last micro-batch is dropped": (
        "dp2",
        replace(step, "accumulate", without_last),
        {"gradients", "norm"},
    ),
    "init: ranks start different": (
        "dp2z0",
        replace(
            apply,
            "initialize",
            lambda whole: lambda model, seed: whole(model, seed + int(os.environ["RANK"])),
        ),
        {"weights"},
    ),
    "clip: by another factor on one rank": (
        "dp2",
        replace(step, "clip_by_norm", one_rank_clips_otherwise),
        {"gradients", "weights"},
    ),
    "tensor: gradient of the logits divided by tp": (
        "tp2",
        replace(vocab_parallel, "parallel_token_losses", half_vocabulary_gradient),
        {"norm"},
    ),
    "tensor: gradients of norms are not summed": (
        "tp2",
        replace(tensor, "local_replica", lambda whole: lambda weight, partial: whole(weight, False)),
        {"gradients", "weights"},
    ),
    "context: the loss is divided twice": (
        "cp2",
        replace(step, "normalized", lambda whole: lambda part, valid_targets: whole(part, valid_targets) / 2),
        {"norm"},
    ),
    "context: the logged loss is not summed over cp": (
        "cp2",
        replace(
            step, "step_loss", lambda whole: lambda a, b, c, d, loss, cp: whole(a / 2, b, c, d, loss, cp)
        ),
        {"loss"},
    ),
    "pipeline: a stage is missing in the norm": (
        "pp2",
        replace(step, "global_norm", lambda whole: lambda parameters, pipeline_group: whole(parameters)),
        {"norm", "gradients"},
    ),
    "pipeline: the last micro-batch is dropped": (
        "pp2",
        replace(step, "normalized", every_eighth_is_lost),
        {"gradients", "norm"},
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_broken_cut_is_seen(
    name: str, dense: tuple[Small, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, patch, columns = DENSE[name]
    patch(monkeypatch)
    seen(dense, parse_layout(layout), columns)


EXPERTS: dict[str, tuple[Patch, set[str]]] = {
    "gradients of experts are doubled": (
        replace(expert, "_local_experts", lambda whole: lambda weight: doubled_gradient(whole(weight))),
        {"gradients", "norm"},
    ),
    "the gradient of the router stays on its rank": (
        replace(expert, "_local_summand", lambda _: lambda weight: weight.to_local()),
        {"gradients"},
    ),
    "recomputed choices are counted again": (replace(Router, "add_micro_batch", twice), {"routers"}),
    "choices are not summed over ranks": (
        replace(
            routing,
            "end_step",
            lambda whole: lambda model, groups, updated: whole(model, groups[1:], updated),
        ),
        {"routers"},
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_broken_experts_are_seen(
    name: str, experts: tuple[Small, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, columns = EXPERTS[name]
    patch(monkeypatch)
    seen(experts, parse_layout("dp2ep2"), columns)


def test_unbroken_all_is_equal(dense: tuple[Small, Outcome], experts: tuple[Small, Outcome]) -> None:
    for word in ("dp2", "dp2z0", "tp2", "cp2", "pp2"):
        assert run_layout(*reordered(dense, word)).status == "equal", word
    assert run_layout(*reordered(experts, "dp2ep2")).status == "equal"


def reordered(case: tuple[Small, Outcome], word: str) -> tuple[Small, Cuts, Outcome]:
    small, expected = case
    return small, parse_layout(word), expected


def seen(case: tuple[Small, Outcome], cuts: Cuts, columns: set[str]) -> None:
    """In `columns` at least."""
    row = run_layout(case[0], cuts, case[1], limit=60)
    breached = {check.name for check in row.checks.values() if not check.ok}
    assert row.status == "breach" and columns <= breached, row
