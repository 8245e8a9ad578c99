"""Expert parallelism through the whole step: losses, every gradient, norm, weights and biases of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.models.test_moe import TINY_M
from tests.parity import TINY_LATENT, Case, assert_parity, close, layout, reference
from titan5d.models.args import Balance, ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.models.moe import MoE
from titan5d.parallel.expert import RowPiece
from titan5d.parallel.expert_dispatch import _Send
from titan5d.parallel.zigzag import SequenceCut
from titan5d.topology import Topology

BALANCED = Balance(aux_loss_coefficient=0.05, z_loss_coefficient=0.01, bias_update_rate=0.001)
ARGS = replace(TINY_M, n_layers=2, balance=BALANCED)
CAPACITY = replace(BALANCED, capacity_factor=0.75)
BEFORE_W2 = replace(CAPACITY, score_before_w2=True)
TIMEOUT = 120.0


def case(args: ModelArgs = ARGS, stage: int = 3, **more: Any) -> Case:
    """Two steps. Names of topology's axes are degrees, all else are fields of the case."""
    degrees = {name: more.pop(name) for name in Topology.__dataclass_fields__ if name in more}
    return Case(Topology(**degrees), stage, args=args, seq_len=32, steps=2, lr=0.1, **more)


def with_experts(n_experts: int, top_k: int = 2, **more: Any) -> ModelArgs:
    return replace(ARGS, n_experts=n_experts, top_k=top_k, **more)


FORCED = with_experts(6, balance=replace(BALANCED, force_load_balance=True))
SIGMOID = {"router_score": "sigmoid", "router_scale": 2.5, "n_expert_groups": 4, "n_limited_groups": 2}

CASES = {
    "whole ranks": case(dp_shard=2, ep=2),
    "beside shards, top 1, accumulation": case(
        with_experts(4, 1, router_normalize=False), stage=2, dp_shard=4, ep=2, accumulation=2
    ),
    "16 experts, top 6, capacity, full recompute": case(
        with_experts(16, 6, balance=CAPACITY), stage=1, dp_shard=4, ep=4, recompute="full", accumulation=2
    ),
    "replicas": case(stage=0, dp_shard=4, ep=2),
    "HSDP": case(dp_replicate=2, dp_shard=2, ep=2),
    "selective recompute, score before w2": case(
        replace(ARGS, balance=BEFORE_W2), dp_shard=2, ep=2, recompute="selective"
    ),
    "fewer experts than ranks": case(with_experts(2), dp_shard=4, ep=2),
    "experts that do not divide over shards": case(with_experts(6), dp_shard=4, ep=2),
    "over tensor ranks alone": case(stage=0, tp=2, ep=2),
    "over data and tensor ranks": case(dp_shard=2, tp=2, ep=4, accumulation=2),
    "beside tensor ranks": case(dp_shard=2, tp=2, ep=2),
    "tensor ranks, experts whole": case(dp_shard=2, tp=2),
    "context ranks, capacity": case(replace(ARGS, balance=BEFORE_W2), cp=2, dp_shard=2, ep=2),
    "context ranks, experts whole": case(replace(ARGS, balance=CAPACITY), cp=2),
    "context x tensor, capacity, documents, padding": case(
        replace(ARGS, balance=CAPACITY), cp=2, tp=2, ep=4, documents=True, padding=5, recompute="full"
    ),
    "pipeline, first rank without experts": case(
        replace(ARGS, n_layers=4, n_dense_layers=3), stage=2, pp=2, dp_shard=2, ep=2
    ),
    "pipeline that splits backward": case(
        replace(ARGS, n_layers=4), stage=2, pp=2, dp_shard=2, ep=2, schedule="ZBVZeroBubble"
    ),
    "compiled": case(dp_shard=2, ep=2, compile=True),
    "beside regrouped shards": case(dp_shard=8, ep=2, reshard_degree=2),
    # 64 choices a row over 6 experts: neither the row's number nor the piece of it may decide
    "context x tensor, forced balance": case(FORCED, cp=2, tp=2, ep=2, accumulation=2, documents=True, padding=5),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    """Cases 065 and 068: gradients above the router and biases, which are compared bit by bit, too."""
    assert_parity(CASES[name], timeout=TIMEOUT)


MATRIX = [
    case(
        with_experts(experts, top_k, balance=balance), stage, ep=ep, accumulation=acc, recompute=ac, **degrees
    )
    for index, (experts, top_k, degrees) in enumerate(
        (experts, top_k, degrees)
        for experts, top_k in ((4, 1), (8, 2), (16, 6))
        for degrees in (
            {"dp_shard": 4},
            {"dp_replicate": 2, "dp_shard": 2},
            {"dp_shard": 2, "tp": 2},
            {"dp_shard": 2, "cp": 2},
            {"dp_shard": 2, "pp": 2},
            {"cp": 2, "tp": 2},
        )
    )
    for ep in (1, 2, 4)
    if (degrees.get("dp_shard", 1) * degrees.get("cp", 1) * degrees.get("tp", 1)) % ep == 0
    for stage, acc, ac, balance in [
        ((1, 2, "none", BALANCED), (2, 1, "full", CAPACITY), (3, 2, "selective", BEFORE_W2))[index % 3]
    ]
]


def named(one: Case) -> str:
    args = one.args
    return f"{one.topology}, {args.n_experts} top {args.top_k}, zero {one.stage}, {one.recompute}"


@pytest.mark.slow
@pytest.mark.parametrize("one", MATRIX, ids=named)
def test_matrix(one: Case) -> None:
    assert_parity(one, timeout=TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"dp_shard": 8}, {"dp_shard": 2, "cp": 2, "tp": 2}], ids=str)
def test_eight_ranks(degrees: dict[str, int]) -> None:
    assert_parity(case(with_experts(16, 6), ep=8, **degrees), timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees", [{"dp_shard": 2, "tp": 2, "ep": 4}, {"dp_replicate": 2, "tp": 4, "ep": 2}], ids=str
)
def test_latent_attention_groups_and_a_dense_layer(degrees: dict[str, int]) -> None:
    stage = 0 if "dp_replicate" in degrees else 3
    assert_parity(case(replace(TINY_LATENT, balance=BALANCED), stage, **degrees), timeout=TIMEOUT)


@pytest.mark.slow
def test_forced_balance_compiled() -> None:
    assert_parity(case(FORCED, cp=2, tp=2, compile=True), timeout=TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_compiled_beside_tensor_ranks(recompute: str) -> None:
    args = replace(ARGS, n_dense_layers=1)
    assert_parity(case(args, dp_shard=2, tp=2, ep=2, compile=True, recompute=recompute), timeout=240)


@pytest.mark.parametrize(
    "degrees", [{"dp_shard": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 4}]
)
def test_ranks_start_equal(degrees: dict[str, int]) -> None:
    """Case 090: whoever holds an expert, it starts as on one process, bit by bit."""
    still = replace(case(**degrees), steps=1, lr=0.0)
    expected = reference(still).weights
    for outcome in layout(still, TIMEOUT):
        for name, weight in expected.items():
            assert torch.equal(outcome.weights[name], weight), name


# Loads


def prefer(model: Decoder, experts: list[int]) -> None:
    for router in model.routers().values():
        router.bias[experts] += 1e4


def first_half(model: Decoder) -> None:
    prefer(model, [0, 1, 2, 3])


def one_hot_expert(model: Decoder) -> None:
    prefer(model, [5])


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("prepare", "top_k"), [(first_half, 2), (one_hot_expert, 1)])
def test_ranks_without_tokens_and_a_hot_expert(prepare: Any, top_k: int, recompute: str) -> None:
    """Case 069: no hang, no missing gradient, and experts without tokens stay as they are."""
    args = with_experts(8, top_k, balance=replace(BALANCED, bias_update_rate=0.0))
    one = case(args, dp_shard=4, ep=2 if top_k == 2 else 4, prepare=prepare, recompute=recompute)
    assert_parity(one, timeout=TIMEOUT)
    idle = [4, 5, 6, 7] if prepare is first_half else [0, 1, 2, 3, 4, 6, 7]
    before = reference(replace(one, lr=0.0)).weights
    for outcome in layout(one, TIMEOUT):
        for name in (name for name in before if ".experts.w" in name and "shared" not in name):
            assert torch.equal(outcome.weights[name][idle], before[name][idle]), name
            assert (outcome.gradients[name][idle] == 0).all()


def poisoned(model: Decoder) -> None:
    """Fills all memory that is not written with NaN from here on."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_nothing_unwritten_is_read() -> None:
    """Case 068: rows over capacity are not sent, and what stands in their place must be zero."""
    args = replace(ARGS, balance=CAPACITY)
    assert_parity(replace(case(args, dp_shard=2, ep=2, prepare=poisoned), steps=3), timeout=TIMEOUT)


def large_experts(model: Decoder) -> None:
    """Experts 0 to 3 a hundred times as large, wherever they are."""
    for block in model.layers.values():
        assert isinstance(block.feed_forward, MoE)
        for weight in block.feed_forward.experts.parameters():
            local, first = weight, 0
            if isinstance(weight, DTensor):
                local = weight.to_local()
                _, offset = compute_local_shape_and_global_offset(
                    weight.shape, weight.device_mesh, weight.placements
                )
                first = offset[0]
            local[: max(0, 4 - first)] *= 100


@pytest.mark.parametrize(
    "degrees",
    [{"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}, {"dp_shard": 4, "ep": 2, "etp": 2}],
    ids=str,
)
def test_one_norm_clips_all_ranks_alike(degrees: dict[str, int]) -> None:
    """Case 013. The experts of one rank dominate the norm, or slices of them on two; the others must be clipped by it
    as well."""
    one = replace(case(**degrees, prepare=large_experts, max_norm=0.1), steps=3)
    expected = reference(one)
    ranks = layout(one, TIMEOUT)
    assert expected.norms[0] > 0.2  # it clips
    for outcome in ranks:
        close(outcome.norms, expected.norms, 1e-5, "norm")
        assert outcome.norms == ranks[0].norms
        for name, weight in ranks[0].weights.items():
            assert torch.equal(outcome.weights[name], weight), name


# The test itself can fail


def test_a_missing_share_of_the_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 068: without the way back of the gradients everything above the experts lacks their part."""
    whole = _Send.backward
    monkeypatch.setattr(_Send, "backward", lambda ctx, grad: (whole(ctx, grad)[0] * 0, None))
    with pytest.raises(AssertionError, match="relative error"):
        assert_parity(case(dp_shard=2, ep=2), timeout=TIMEOUT)


def test_row_pieces_are_the_whole_rows_once() -> None:
    rows = torch.arange(2 * 16 * 3).view(2, 16, 3)
    for load_balancer in ("headtail", "none"):
        cut = SequenceCut(2, load_balancer)  # type: ignore[arg-type]
        ranks = [RowPiece(cut, context, 4, tensor) for context in range(2) for tensor in range(4)]
        pieces = torch.stack([piece.of(rows) for piece in ranks])
        assert pieces.shape == (8, 2, 2, 3)
        assert torch.equal(ranks[0].join(pieces), rows)
