"""Which choices are dropped, against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch

from titan5d.models.capacity import drop_over_capacity


def dropped_by_hand(experts: torch.Tensor, n_experts: int, factor: float) -> torch.Tensor:
    kept = experts.clone()
    for row in range(experts.shape[0]):
        room = math.ceil(factor * int((experts[row] < n_experts).sum()) / n_experts)
        taken = [0] * n_experts
        for token in range(experts.shape[1]):
            for slot in range(experts.shape[2]):
                expert = int(experts[row, token, slot])
                if expert == n_experts:
                    continue
                if taken[expert] == room:
                    kept[row, token, slot] = n_experts
                else:
                    taken[expert] += 1
    return kept


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 1.25, 8.0])
def test_the_first_of_each_row_stay(factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = (torch.rand(3, 20, 9, generator=generator) ** 3).topk(2, dim=-1).indices  # 8 = nowhere
    experts[1, 8:] = 8  # a row that is mostly padding has less room
    found = drop_over_capacity(experts, 8, factor)
    assert (found == dropped_by_hand(experts, 8, factor)).all()
    if factor == 8.0:
        assert (found == experts).all()


def test_rows_do_not_share_room_and_order_of_time_decides() -> None:
    experts = torch.zeros(2, 6, 1, dtype=torch.int64)
    kept = drop_over_capacity(experts, 3, 1.0)  # ceil(6 / 3) = 2 for each expert in each row
    assert kept[..., 0].tolist() == [[0, 0, 3, 3, 3, 3]] * 2
    assert (drop_over_capacity(experts[:1], 3, 1.0) == kept[:1]).all()
