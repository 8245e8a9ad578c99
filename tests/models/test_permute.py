"""Sorting choices by expert, carrying rows there and back, and the gradients of both, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from titan5d.models.permute import combine, permute, sort_by_expert


def routing(tokens: int = 9, top_k: int = 3, n_experts: int = 5) -> torch.Tensor:
    """Random choices; some are n_experts: nowhere."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, n_experts + 1, generator=generator)
    return scores.topk(top_k, dim=1).indices


def test_the_picture_in_the_docstring() -> None:
    order = sort_by_expert(torch.tensor([[2, 0], [0, 1], [2, 2]]), 3)
    assert order.choice.tolist() == [1, 2, 3, 0, 4, 5]
    assert order.ends.tolist() == [2, 3, 6] and order.ends.dtype == torch.int32
    assert order.place.tolist() == [[3, 0], [1, 2], [4, 5]]


def test_order_is_by_expert_then_by_token_and_nowhere_comes_last() -> None:
    experts = routing()
    order = sort_by_expert(experts, 5)
    flat = experts.flatten()
    assert order.choice.tolist() == sorted(range(27), key=lambda choice: (int(flat[choice]), choice))
    counts = torch.bincount(flat, minlength=6)
    assert order.ends.tolist() == counts.cumsum(0)[:5].tolist()
    assert (order.choice[order.place.flatten()] == torch.arange(27)).all()


@pytest.mark.parametrize("top_k", [1, 3])
def test_permute_and_combine_equal_indexing_with_gradients(top_k: int) -> None:
    torch.manual_seed(0)
    experts = routing(top_k=top_k)
    order = sort_by_expert(experts, 5)
    tokens = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, top_k, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(9, 8, dtype=torch.float64)

    def plain() -> torch.Tensor:
        rows = tokens[:, None].expand(-1, top_k, -1).square()
        return (rows * weights[..., None]).sum(1)

    def ours() -> torch.Tensor:
        return combine(permute(tokens, order).square(), order, weights)

    torch.testing.assert_close(ours(), plain(), rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad((plain() * upstream).sum(), (tokens, weights))
    found = torch.autograd.grad((ours() * upstream).sum(), (tokens, weights))
    for ours_, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-12, atol=1e-12)
    one = torch.autograd.grad((combine(permute(tokens, order), order, None) * upstream).sum(), tokens)[0]
    torch.testing.assert_close(one, top_k * upstream, rtol=1e-12, atol=1e-12)


def test_bf16_rows_are_added_in_fp32() -> None:
    order = sort_by_expert(torch.tensor([[0, 1, 2]]), 3)
    half = 2.0**-8  # half of the last place of 1: lost beside it in bf16, twice it is not
    rows = torch.tensor([[1.0], [half], [half]], dtype=torch.bfloat16)
    assert combine(rows, order, None).item() == 1 + 2 * half
    assert combine(rows, order, torch.ones(1, 3)).item() == 1 + 2 * half
