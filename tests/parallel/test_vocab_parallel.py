"""Embedding and loss over a cut vocabulary against torch on one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo  # the first custom operator imports it: once here instead of on each forked rank
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity import TINY, Case, global_batch
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import RankFailed, run_ranks
from titan5d.models.cross_entropy import IGNORE, ChunkedCrossEntropy
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.tensor import TensorParallel
from titan5d.parallel.tensor_collectives import TensorCut
from titan5d.parallel.vocab_parallel import VocabParallelCrossEntropy, VocabSlice
from titan5d.topology import Topology

BATCH, SEQ, DIM = 2, 12, 16


def inputs(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden (B, S, D), weight (V, D), labels (B, S) with and without targets, the last row among them."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, SEQ, DIM, generator=generator) * 3
    weight = torch.randn(vocab, DIM, generator=generator)
    labels = torch.randint(vocab, (BATCH, SEQ), generator=generator)
    labels[0, :5] = IGNORE
    labels[0, 6] = vocab - 1
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def cut_and_slice(vocab: int, sequence_parallel: bool = True) -> tuple[TensorCut, VocabSlice]:
    rank, degree = dist.get_rank(), dist.get_world_size()
    cut = TensorCut(dist.group.WORLD.group_name, degree, rank, sequence_parallel)  # type: ignore[union-attr]
    return cut, VocabSlice(vocab, degree, rank)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def loss_and_gradients(
    vocab: int,
    gather_logits: bool,
    chunk_bytes: int,
    sequence_parallel: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """(loss, row sums, this rank's d hidden, this rank's d weight, largest tensor)."""
    hidden, weight, labels = inputs(vocab, dtype)
    cut, slice = cut_and_slice(vocab, sequence_parallel)
    mine = hidden.chunk(cut.degree, 1)[cut.rank] if sequence_parallel else hidden
    mine = mine.detach().requires_grad_()
    rows = weight[slice.start : slice.stop].detach().requires_grad_()
    with LargestTensor() as largest:
        loss, row_sums = VocabParallelCrossEntropy(slice, cut, gather_logits, chunk_bytes)(mine, rows, labels)
        (loss * 0.5).backward()
    assert mine.grad is not None and rows.grad is not None
    return loss.detach(), row_sums, mine.grad, rows.grad, largest.elements


@pytest.mark.parametrize("gather_logits", [False, True])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("ranks", "vocab", "chunk_tokens"), [(2, 50, 0), (4, 50, 7), (4, 49, 1), (3, 8, 5)], ids=str
)
def test_equals_one_process(
    ranks: int, vocab: int, chunk_tokens: int, sequence_parallel: bool, gather_logits: bool
) -> None:
    chunk_bytes = 4 * chunk_tokens * (vocab if gather_logits else -(-vocab // ranks))
    results = run_ranks(loss_and_gradients, ranks, vocab, gather_logits, chunk_bytes, sequence_parallel)
    hidden, weight, labels = inputs(vocab)
    expected, expected_rows = ChunkedCrossEntropy()(hidden, weight, labels)
    (expected * 0.5).backward()
    for loss, rows, d_hidden, _, _ in results:
        assert torch.equal(loss, results[0][0]) and torch.equal(
            rows, results[0][1]
        )  # the same bits on every rank
        torch.testing.assert_close((loss, rows), (expected, expected_rows), rtol=1e-6, atol=1e-6)
        if not sequence_parallel:
            torch.testing.assert_close(d_hidden, hidden.grad, rtol=1e-5, atol=1e-5)
    if sequence_parallel:
        d_hidden = torch.cat([result[2] for result in results], 1)
        torch.testing.assert_close(d_hidden, hidden.grad, rtol=1e-5, atol=1e-5)
    d_weight = torch.cat([result[3] for result in results])
    torch.testing.assert_close(d_weight, weight.grad, rtol=1e-5, atol=1e-5)


def test_logits_are_never_gathered() -> None:
    vocab, tokens = 4000, BATCH * SEQ
    results = run_ranks(loss_and_gradients, 4, vocab, False, 0, True)
    assert max(result[4] for result in results) <= tokens * vocab // 4
    in_chunks = run_ranks(loss_and_gradients, 4, vocab, False, 4 * 6 * vocab // 4, True)
    assert max(result[4] for result in in_chunks) <= max(6 * vocab // 4, vocab // 4 * DIM)


def test_bf16() -> None:
    results = run_ranks(loss_and_gradients, 2, 51, False, 0, True, torch.bfloat16)
    hidden, weight, labels = inputs(51, torch.bfloat16)
    expected, _ = ChunkedCrossEntropy()(hidden, weight, labels)
    (expected * 0.5).backward()
    # the same bf16 logits, summed in fp32: the loss is as exact as on one process
    torch.testing.assert_close(results[0][0], expected, rtol=1e-6, atol=1e-6)
    d_weight = torch.cat([result[3] for result in results])
    torch.testing.assert_close(d_weight, weight.grad, rtol=1e-2, atol=1e-2)


def extreme_loss() -> torch.Tensor:
    """One rank's logits are all far below the other's: its softmax share must vanish, not overflow."""
    cut, slice = cut_and_slice(8, sequence_parallel=False)
    weight = torch.zeros(8, 1)
    weight[:4] = -1e4
    hidden = torch.ones(1, 1, 1, requires_grad=True)
    rows = weight[slice.start : slice.stop].clone().requires_grad_()
    loss, _ = VocabParallelCrossEntropy(slice, cut, False, 0)(hidden, rows, torch.tensor([[5]]))
    loss.backward()
    assert hidden.grad is not None and rows.grad is not None
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(rows.grad).all()
    return loss.detach()


def test_a_rank_without_any_share_of_the_softmax() -> None:
    for loss in run_ranks(extreme_loss, 2):
        torch.testing.assert_close(loss, torch.tensor(4.0).log())


def whole_model(tp: int, sequence_parallel: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Whole logits of a model with an odd vocabulary, and the gradients of a loss made from them by hand."""
    case = Case(Topology(tp=tp), args=replace(TINY, n_layers=1, vocab_size=250), valid=(64, 30), seq_len=16)
    plan = TensorParallel(sequence_parallel=sequence_parallel)
    rest = (DataParallel(0), ActivationCheckpoint(), Compile(), torch.float32, 5, torch.device("cpu"), plan)
    model = build_parallel_model(case.args, Meshes(case.topology, "cpu"), *rest)
    tokens, labels, positions, _ = global_batch(case, 0)
    logits = model(tokens, positions)
    assert isinstance(logits, torch.Tensor)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in gradients.items()
    }


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_whole_logits_and_their_gradients(sequence_parallel: bool) -> None:
    expected, expected_gradients = run_ranks(whole_model, 1, 1, True)[0]
    for logits, gradients in run_ranks(whole_model, 4, 4, sequence_parallel):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def run_tokens(tokens: list[list[int]], labels: list[list[int]] | None = None) -> None:
    meshes = Meshes(Topology(tp=2), "cpu")
    rest = (DataParallel(0), ActivationCheckpoint(), Compile(), torch.float32, 5, torch.device("cpu"))
    model = build_parallel_model(replace(TINY, n_layers=1, vocab_size=10), meshes, *rest)
    model(torch.tensor(tokens), None, None, None if labels is None else torch.tensor(labels))


@pytest.mark.parametrize("bad", [10, -1])
def test_ids_outside_of_the_vocabulary_are_errors_as_on_one_device(bad: int) -> None:
    with pytest.raises(RankFailed, match="index out of range"):
        run_ranks(run_tokens, 2, [[1, bad]], timeout=30)
    with pytest.raises(RankFailed, match="out of bounds"):
        run_ranks(run_tokens, 2, [[1, 2]], [[3, bad]], timeout=30)


def test_a_row_that_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(
        RankFailed, match=r"rows of 3 tokens do not divide into 2 equal pieces.*multiple of 2"
    ):
        run_ranks(run_tokens, 2, [[1, 2, 3]], timeout=30)
