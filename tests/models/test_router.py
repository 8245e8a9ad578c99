"""Choice and weights of the router against the definition; fp32 throughout; padding; state that survives casts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from titan5d.models.args import Balance, ModelArgs
from titan5d.models.router import Router

ARGS = ModelArgs(
    dim=16,
    n_layers=1,
    n_heads=2,
    n_kv_heads=2,
    ffn_dim=16,
    vocab_size=32,
    n_experts=8,
    top_k=2,
    moe_ffn_dim=16,
)


def build(args: ModelArgs = ARGS, seed: int = 0) -> Router:
    torch.manual_seed(seed)
    router = Router(args)
    torch.nn.init.normal_(router.weight)
    return router


def hidden(rows: int = 2, seq: int = 12, dim: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, seq, dim, generator=torch.Generator().manual_seed(seed))


def by_definition(router: Router, x: torch.Tensor, args: ModelArgs) -> dict[int, dict[int, float]]:
    """Token -> {expert: weight}, in Python, one token after the other."""
    found = {}
    logits = (x.double() @ router.weight.double().T).flatten(0, 1)
    for token, row in enumerate(logits):
        scores = (row.softmax(0) if args.router_score == "softmax" else row.sigmoid()).tolist()
        choice = [score + bias for score, bias in zip(scores, router.bias.tolist(), strict=True)]
        size = args.n_experts // args.n_expert_groups
        groups = [range(g * size, (g + 1) * size) for g in range(args.n_expert_groups)]
        best = sorted(groups, key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:2]))
        allowed = [e for group in best[: args.n_limited_groups] for e in group]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: args.top_k]
        total = sum(scores[e] for e in chosen) if args.router_normalize else 1.0
        found[token] = {e: scores[e] / total * args.router_scale for e in chosen}
    return found


@pytest.mark.parametrize(
    ("score", "normalize", "scale", "top_k"),
    [*product(("softmax", "sigmoid"), (True, False), (1.0, 2.5), (1, 2, 8))],
)
def test_score_bias_choice_normalise_scale(score: Any, normalize: bool, scale: float, top_k: int) -> None:
    """Case 063."""
    args = replace(ARGS, router_score=score, router_normalize=normalize, router_scale=scale, top_k=top_k)
    router, x = build(args), hidden()
    router.bias.copy_(torch.linspace(-0.3, 0.3, 8))
    experts, weights = router.eval()(x, None)
    assert experts.shape == weights.shape == (2, 12, top_k)
    expected = by_definition(router, x, args)
    for token, (chosen, given) in enumerate(zip(experts.flatten(0, 1), weights.flatten(0, 1), strict=True)):
        assert dict(zip(chosen.tolist(), given.tolist(), strict=True)) == pytest.approx(
            expected[token], rel=1e-5
        )
    if normalize and top_k == 8:
        torch.testing.assert_close(weights.sum(-1), torch.full((2, 12), scale))


@pytest.mark.parametrize(("groups", "limit"), [(4, 1), (4, 2), (2, 1), (8, 3), (1, 1)])
def test_a_token_stays_within_its_best_groups(groups: int, limit: int) -> None:
    top_k = min(2, 8 // groups * limit)
    args = replace(ARGS, router_score="sigmoid", n_expert_groups=groups, n_limited_groups=limit, top_k=top_k)
    router, x = build(args), hidden()
    router.bias.copy_(torch.linspace(0.2, -0.2, 8))
    experts, _ = router.eval()(x, None)
    for token, expected in by_definition(router, x, args).items():
        assert set(experts.flatten(0, 1)[token].tolist()) == expected.keys()


def test_bias_changes_the_choice_and_no_weight() -> None:
    router, x = build(), hidden()
    before, _ = router.eval()(x, None)
    router.bias[3] = 10.0
    experts, weights = router(x, None)
    assert (experts == 3).any(-1).all() and not (before == 3).any(-1).all()
    scores = (x @ router.weight.T).softmax(-1).gather(-1, experts)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_logits_closer_than_bf16_are_told_apart() -> None:
    """Case 070: rows (1 + e/1000) u, so a token's experts are 7, 6 or 0, 1 by the sign of its product with u."""
    router, x = build(), hidden().bfloat16()
    u = torch.randn(16, generator=torch.Generator().manual_seed(2))
    router.weight.data = (1 + 0.001 * torch.arange(8)[:, None]) * u
    with torch.autocast("cpu", torch.bfloat16):
        experts, weights = router.eval()(x, None)
    assert weights.dtype == torch.float32
    positive = (x.float() @ u > 0)[..., None]
    assert (experts == torch.where(positive, torch.tensor([7, 6]), torch.tensor([0, 1]))).all()


def test_state_stays_fp32_and_int64_when_the_model_is_cast_and_moved() -> None:
    router = build(replace(ARGS, balance=Balance(bias_update_rate=1e-3)))
    load = torch.tensor([5, 0, 0, 0, 0, 0, 0, 3])
    for _ in range(10):
        router.end_step(load, updated=True)
    kept = router.bias.clone()
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.bias.dtype == router.factors.dtype == router.step_sums.dtype == torch.float32
    assert router.load.dtype == router.step_counts.dtype == torch.int64
    assert (router.bias == kept).all()
    torch.testing.assert_close(kept, torch.tensor([-0.01, *[0.01] * 6, -0.01]), rtol=0, atol=1e-6)
    assert set(router.state_dict()) == {"weight", "bias", "load"}


def test_padding_goes_nowhere() -> None:
    router, x = build(), hidden()
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, 7:] = True
    alone, weights_alone = router(x, None)
    experts, weights = router(x, padding)
    assert (experts[padding] == 8).all()
    assert (experts[~padding] == alone[~padding]).all() and (
        weights[~padding] == weights_alone[~padding]
    ).all()
    assert router.micro_batch_counts[:8].sum() == 2 * (24 - 5)


def test_forced_balance_is_even_and_still_has_a_gradient() -> None:
    router = build(replace(ARGS, balance=Balance(force_load_balance=True)))
    experts, weights = router(hidden(), None)
    assert (torch.bincount(experts.flatten(), minlength=8) == 6).all()
    assert all(len(set(chosen)) == 2 for chosen in experts.flatten(0, 1).tolist())
    weights[..., 0].sum().backward()
    assert router.weight.grad is not None and router.weight.grad.abs().max() > 0


def test_forced_balance_goes_by_the_place_in_the_row() -> None:
    """Of 7 tokens a row, whichever rows are together."""
    router = build(replace(ARGS, balance=Balance(force_load_balance=True)))
    experts, _ = router(hidden()[:, :7], None)
    assert experts[0].tolist() == experts[1].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3], [4, 5]]


def test_nothing_is_counted_outside_of_training() -> None:
    router = build().eval()
    router(hidden(), None)
    assert router.micro_batch_counts.sum() == 0


def test_a_left_out_step_moves_nothing() -> None:
    router = build(replace(ARGS, balance=Balance(bias_update_rate=1e-3)))
    router(hidden(), None)
    router.add_micro_batch()
    assert router.step_counts.sum() == 48
    router.end_step(router.step_counts[:-1].clone(), updated=False)
    assert (router.bias == 0).all() and (router.load == 0).all() and (router.step_counts == 0).all()
