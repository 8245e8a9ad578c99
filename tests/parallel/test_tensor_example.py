"""The worked example of docs/tensor_parallel.md on two ranks, with the operators that training uses."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # the first custom operator imports it: once here instead of on each forked rank
import torch.distributed as dist
from torch import nn

from titan5d.launch.local_ranks import run_ranks
from titan5d.parallel.tensor_collectives import TensorCut
from titan5d.parallel.tensor_products import column_products, row_product
from titan5d.parallel.vocab_parallel import VocabParallelEmbedding, VocabSlice

X = torch.arange(8.0).view(1, 4, 2)
"""One row of four tokens, two wide: [0 1], [2 3], [4 5], [6 7]."""
W = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
"""(out, in), as a linear layer holds it."""
Y = torch.tensor([[20.0, 40.0], [80.0, 180.0], [140.0, 320.0], [200.0, 460.0]])
"""X W^T."""


def tensor_cut(sequence_parallel: bool) -> TensorCut:
    group = dist.group.WORLD
    assert group is not None
    return TensorCut(group.group_name, group.size(), group.rank(), sequence_parallel)


def my_piece(whole: torch.Tensor, cut: TensorCut) -> torch.Tensor:
    """This rank's tokens of (B, S, ...)."""
    return whole.chunk(cut.degree, 1)[cut.rank].clone() if cut.sequence_parallel else whole.clone()


def by_columns(sequence_parallel: bool) -> torch.Tensor:
    cut = tensor_cut(sequence_parallel)
    weight = W.chunk(2, 0)[cut.rank]  # one output a rank
    return column_products(my_piece(X, cut), [weight], cut)[0]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_columns_side_by_side_are_the_product(sequence_parallel: bool) -> None:
    left, right = run_ranks(by_columns, 2, sequence_parallel)
    assert left.flatten().tolist() == [20, 80, 140, 200]
    assert right.flatten().tolist() == [40, 180, 320, 460]
    assert torch.equal(torch.cat((left, right), -1)[0], Y)


def by_rows(sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    cut = tensor_cut(sequence_parallel)
    mine, weight = X.chunk(2, -1)[cut.rank], W.chunk(2, -1)[cut.rank]  # one input a rank
    return mine @ weight.t(), row_product(mine, weight, cut)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_partial_sums_of_rows_add_up_to_the_product(sequence_parallel: bool) -> None:
    (left, first), (right, second) = run_ranks(by_rows, 2, sequence_parallel)
    assert left[0].tolist() == [[0, 0], [20, 60], [40, 120], [60, 180]]
    assert right[0].tolist() == [[20, 40], [60, 120], [100, 200], [140, 280]]
    assert torch.equal((left + right)[0], Y)
    if sequence_parallel:  # two tokens on each rank
        assert torch.equal(torch.cat((first, second), 1)[0], Y)
    else:
        assert torch.equal(first[0], Y) and torch.equal(second[0], Y)


def by_vocabulary(sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    cut = tensor_cut(sequence_parallel)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    embedding = nn.Embedding.from_pretrained(torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0], [60.0]]))
    shards = torch.distributed.tensor.distribute_tensor(
        embedding.weight, mesh, [torch.distributed.tensor.Shard(0)]
    )
    embedding.weight = nn.Parameter(shards)
    parallel = VocabParallelEmbedding(embedding, cut)
    tokens = torch.tensor([[1, 4, 2, 5]])
    return parallel.slice.owned(tokens), parallel(tokens)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_rows_of_the_vocabulary_add_up_to_the_embedding(sequence_parallel: bool) -> None:
    (lower, first), (upper, second) = run_ranks(by_vocabulary, 2, sequence_parallel)
    assert lower.tolist() == [[True, False, True, False]]
    assert upper.tolist() == [[False, True, False, True]]
    if sequence_parallel:
        assert torch.cat((first, second), 1).flatten().tolist() == [20, 50, 30, 60]
    else:
        assert first.flatten().tolist() == second.flatten().tolist() == [20, 50, 30, 60]


def test_slices_of_an_uneven_vocabulary() -> None:
    slices = [VocabSlice(250, 4, rank) for rank in range(4)]
    assert [(part.start, part.stop) for part in slices] == [(0, 63), (63, 126), (126, 189), (189, 250)]
