"""A dry run against the same step on real CPU ranks: memory within 3%, every byte that is sent equal."""

from __future__ import annotations

import pytest
import torch

from tests.dryrun.layouts import LAYOUTS, PAR, Small, dense, dry, experts, real
from titan5d.dryrun import trace
from titan5d.dryrun.kinds import RankKind
from titan5d.dryrun.trace import Assumed, TraceError, trace_rank
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.flops import FULL_RECOMPUTE, flop_shape, training_flops, work_of
from titan5d.parallel import tensor_products

SLOW = (
    "PP x TP",
    "experts, ZeRO-1, full recompute",
    "experts x slices, selective recompute",
    "experts x TP",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAYOUTS]
)
def test_memory_and_traffic_are_those_of_a_real_run(name: str) -> None:
    case = LAYOUTS[name]
    ranks = run_ranks(real, case.world, case)
    for rank in sorted({0, case.world - 1}):
        peak, highest, traffic = ranks[rank]
        found = dry(case, rank)
        assert found.peak.total == pytest.approx(peak.total, rel=0.03), f"rank {rank}"
        for purpose in ("weights", "optimizer", "gathered", "gradients"):
            assert getattr(found.highest, purpose) == pytest.approx(getattr(highest, purpose), rel=0.03), (
                purpose
            )
        assert list(found.traffic) == traffic, f"rank {rank}"
        assert found.garbage < 1024  # a few scalars of a pipeline's pass


@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(
                dense(2, f"{PAR}.zero_stage {stage}", "training.global_batch_size 24"),
                id=f"ZeRO-{stage}",
                marks=pytest.mark.slow if stage in (0, 1) else (),
            )
            for stage in range(4)
        ),
        pytest.param(
            experts(2, f"{PAR}.expert_parallel_degree 2", f"{PAR}.zero_stage 3", "training.global_batch_size 24"),
            id="experts",
        ),
        pytest.param(
            dense(
                4,
                f"{PAR}.tensor_parallel_degree 2",
                "training.global_batch_size 24",
                "activation_checkpoint.mode full",
            ),
            id="TP x FSDP, recompute",
        ),
    ],
)
def test_micro_batches_that_are_not_traced_count(case: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _, layout = case.prepared()
    accumulation, skipped = layout.accumulation, layout.accumulation - trace.TRACED
    assert skipped > 2
    few = dry(case, 1)
    monkeypatch.setattr(trace, "TRACED", accumulation)
    whole = dry(case, 1)
    assert few.traffic == whole.traffic
    assert (few.product_flops, few.attention_flops) == (whole.product_flops, whole.attention_flops)
    assert few.timeline.keys() == whole.timeline.keys()
    # Nothing of a micro-batch stays but its tokens' ids and its rows' losses
    ids = 8 * config.training.local_batch_size * (config.training.seq_len + 1)
    assert 0 <= whole.peak.total - few.peak.total <= skipped * ids


@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_flops_of_all_ranks_are_the_closed_form(mode: str) -> None:
    case = dense(
        4,
        f"{PAR}.tensor_parallel_degree 2",
        f"{PAR}.pipeline_parallel_degree 2",
        "training.global_batch_size 4",
        f"activation_checkpoint.mode {mode}",
        "activation_checkpoint.early_stop false",
    )
    config, args, _ = case.prepared()
    counted = sum(
        trace.product_flops + trace.attention_flops for trace in (dry(case, rank) for rank in range(4))
    )
    work = work_of([config.training.seq_len] * 4)
    coefficients = training_flops(flop_shape(args))
    expected = (
        coefficients.hardware_flops(work, FULL_RECOMPUTE)
        if mode == "full"
        else coefficients.model_flops(work)
    )
    assert counted == pytest.approx(expected, rel=1e-9)


def test_the_fullest_rank_of_uneven_experts_holds_and_computes_more() -> None:
    case = experts(2, f"{PAR}.expert_parallel_degree 2", "training.global_batch_size 4")
    config, args, layout = case.prepared()
    kind = RankKind(0, "")
    even, uneven = (trace_rank(config, args, layout, kind, Assumed(imbalance=f)) for f in (1.0, 1.5))
    assert uneven.peak.activations > even.peak.activations
    assert uneven.product_flops > even.product_flops


def test_an_error_names_rank_and_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that is one column short, on the ranks of the second half of a tensor group: no rule sees it."""
    original = tensor_products._local

    def wrong(parameter: torch.Tensor) -> torch.Tensor:
        return original(parameter)[:, :-1]

    monkeypatch.setattr(tensor_products, "_local", wrong)
    case = dense(
        4,
        f"{PAR}.tensor_parallel_degree 2",
        f"{PAR}.pipeline_parallel_degree 2",
        "training.global_batch_size 4",
    )
    with pytest.raises(TraceError) as caught:
        dry(case, 2)
    assert caught.value.moment.phase == "forward"
    assert caught.value.moment.part == "layers.1.attention"
    text = str(caught.value)
    assert "rank 2 (last stage: 1 of 0..1), in forward, layers.1.attention" in text
    assert "tensor_products.py" in text
