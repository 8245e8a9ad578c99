"""The losses against their formulas token by token; parts of a step add up; the bias counts whole numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from titan5d.models.args import Balance, ModelArgs
from titan5d.models.balance import count_choices, load_balancing_loss, updated_bias, with_loss
from titan5d.models.router import AUX_LOSS, ENTROPY, Z_LOSS, Router

E, K = 8, 2
ARGS = ModelArgs(
    dim=16,
    n_layers=1,
    n_heads=2,
    n_kv_heads=2,
    ffn_dim=16,
    vocab_size=32,
    n_experts=E,
    top_k=K,
    moe_ffn_dim=16,
)
KINDS = ("sequence", "micro_batch", "global_batch")


def build(kind: Any = "sequence", score: Any = "softmax", aux: float = 0.01, z: float = 0.001) -> Router:
    torch.manual_seed(0)
    balance = Balance(aux_loss_coefficient=aux, aux_loss_kind=kind, z_loss_coefficient=z)
    router = Router(replace(ARGS, router_score=score, balance=balance))
    torch.nn.init.normal_(router.weight)
    router.load.copy_(torch.arange(E) + 1)
    return router


def rows(n: int = 4, seq: int = 6) -> torch.Tensor:
    return torch.randn(n, seq, 16, generator=torch.Generator().manual_seed(1))


def padded(n: int = 4, seq: int = 6) -> torch.Tensor:
    padding = torch.zeros(n, seq, dtype=torch.bool)
    padding[0, 4:] = padding[2, 1:] = True
    return padding


def written_out(
    router: Router, x: torch.Tensor, padding: torch.Tensor, tokens: int, parts: int
) -> torch.Tensor:
    """alpha * sum f P and beta * mean lse^2 as the papers have them, in float64, with plain loops over tokens."""
    balance, load = router.balance, router.load.double()
    logits = x.double() @ router.weight.double().T
    scores = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)

    def loss_of(places: list[tuple[int, int]]) -> torch.Tensor:
        f, p = torch.zeros(E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
        for row, place in places:
            f[scores[row, place].topk(K).indices] += E / (K * len(places))
            p = p + shares[row, place] / len(places)
        return (f * p).sum() * balance.aux_loss_coefficient

    places = [
        (row, place) for row in range(x.shape[0]) for place in range(x.shape[1]) if not padding[row, place]
    ]
    if balance.aux_loss_kind == "sequence":
        by_row = [[one for one in places if one[0] == row] for row in range(x.shape[0])]
        aux = sum((loss_of(row) for row in by_row), torch.zeros(())) / parts
    elif balance.aux_loss_kind == "micro_batch":
        aux = loss_of(places) / parts
    else:
        p = sum((shares[one] for one in places), torch.zeros(())) / tokens
        aux = balance.aux_loss_coefficient * (E * load / load.sum() * p).sum()
    z = sum((logits[one].exp().sum().log() ** 2 for one in places), torch.zeros(())) / tokens
    return torch.stack((aux, balance.z_loss_coefficient * z))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_equal_the_formulas(kind: str, score: str) -> None:
    router, x, padding = build(kind, score), rows().requires_grad_(), padded()
    tokens = int((~padding).sum())
    router.begin_step(tokens, rows=4, micro_batches=3)
    _, weights = router(x, padding)
    (weights * 0).sum().backward()  # a loss that has no gradient of its own
    expected = written_out(
        router, x.detach(), padding, tokens, {"sequence": 4, "micro_batch": 3}.get(kind, 1)
    )
    found = router.micro_batch_sums[[AUX_LOSS, Z_LOSS]]
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=0)
    assert router.weight.grad is not None and x.grad is not None
    ours = router.weight.grad.clone(), x.grad.clone()
    leaf = x.detach().clone().requires_grad_()
    router.weight.grad = None
    written_out(
        router, leaf, padding, tokens, {"sequence": 4, "micro_batch": 3}.get(kind, 1)
    ).sum().backward()
    assert leaf.grad is not None
    for mine, theirs in zip(ours, (router.weight.grad, leaf.grad), strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert (x.grad[padding] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_micro_batches_add_up(kind: str) -> None:
    """Accumulation and data parallelism: parts of a step, each told of the whole, sum to the whole.

    Of `micro_batch` the whole is by definition the mean over the same micro-batches.
    """
    x, padding = rows(), padded()
    tokens = int((~padding).sum())

    def gradient(pieces: int) -> torch.Tensor:
        router = build(kind)
        router.begin_step(tokens, rows=4, micro_batches=pieces)
        for part, empty in zip(x.chunk(pieces), padding.chunk(pieces), strict=True):
            (router(part, empty)[1] * 0).sum().backward()
        assert router.weight.grad is not None
        return router.weight.grad

    whole = gradient(1)
    for pieces in (2, 4):
        difference = (gradient(pieces) - whole).abs().max() / whole.abs().max()
        if kind == "micro_batch":
            assert difference > 1e-2
        else:
            assert difference <= 1e-5


def test_even_load_costs_exactly_the_coefficient() -> None:
    counts = torch.full((3, E), 6)
    shares = torch.full((3, E), 24 / E)  # 24 tokens a row
    assert load_balancing_loss(shares, counts, K, "sequence", counts[0]) == pytest.approx(3)
    assert load_balancing_loss(shares, counts, K, "micro_batch", counts[0]) == pytest.approx(1)
    assert load_balancing_loss(shares, counts, K, "global_batch", counts[0]) == pytest.approx(3 * 24)
    # before the first step nothing is known of the load: even
    assert load_balancing_loss(shares, counts, K, "global_batch", 0 * counts[0]) == pytest.approx(3 * 24)


def test_all_tokens_to_one_expert_cost_the_most() -> None:
    counts, shares = torch.zeros(1, E, dtype=torch.int64), torch.zeros(1, E)
    counts[0, 2], shares[0, 2] = 10, 10.0
    assert load_balancing_loss(shares, counts, 1, "sequence", counts[0]) == pytest.approx(E)


def test_a_step_that_was_not_begun_shows() -> None:
    router = build()
    (router(rows(), None)[1] * 0).sum().backward()
    assert router.weight.grad is not None and router.weight.grad.isnan().any()


def test_without_coefficients_nothing_is_added() -> None:
    router = build(aux=0.0, z=0.0)
    (router(rows(), None)[1] * 0).sum().backward()
    assert router.weight.grad is not None and (router.weight.grad == 0).all()


def test_entropy_is_that_of_the_scores() -> None:
    router, x = build(), rows()
    router.begin_step(24, 4, 1)
    router(x, None)
    expected = torch.distributions.Categorical(logits=x @ router.weight.T).entropy().sum()
    torch.testing.assert_close(router.micro_batch_sums[ENTROPY], expected.detach(), rtol=1e-5, atol=0)


def test_with_loss_is_the_identity_with_a_gradient_of_one() -> None:
    x, loss = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    out = with_loss(x, 5 * loss)
    assert (out == x).all()
    (7 * out).sum().backward()
    assert (x.grad == 7).all() and loss.grad == 5


def test_counts_by_row_leave_nowhere_out() -> None:
    experts = torch.tensor([[[0, 1], [1, 3]], [[3, 3], [3, 2]]])
    assert count_choices(experts, 3).tolist() == [[1, 2, 0], [0, 0, 1]]


def test_bias_moves_by_whole_numbers() -> None:
    """Counts whose mean bf16 would round the wrong way: 40,840 lies between 40,704 and 40,960 there."""
    load = torch.tensor([40_841, 40_839, 40_840, 40_840])
    assert updated_bias(torch.zeros(4), load, 0.001).tolist() == pytest.approx([-0.001, 0.001, 0.0, 0.0])
    huge = torch.tensor([2**40 + 1, 2**40 - 1])  # beyond fp32, too
    assert updated_bias(torch.zeros(2), huge, 1.0).tolist() == [-1.0, 1.0]
    assert updated_bias(torch.ones(2), torch.zeros(2, dtype=torch.int64), 1.0).tolist() == [1.0, 1.0]
