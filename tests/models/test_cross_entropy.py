"""The chunked loss against F.cross_entropy on whole logits: value, gradients, rows, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titan5d.models.cross_entropy import IGNORE, ChunkedCrossEntropy

BATCH, SEQ, DIM, VOCAB = 3, 7, 16, 50
ALL_AT_ONCE = 0


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss_sum, row_sums, d_hidden, d_weight) of `loss_sum * factor`, fp64."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = (hidden @ weight.t()).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="none")
    (losses.sum() * factor).backward()
    assert hidden.grad is not None and weight.grad is not None
    return losses.sum().detach(), losses.detach().view(labels.shape).sum(1), hidden.grad, weight.grad


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, SEQ, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    labels[0, 2:5] = IGNORE
    labels[2] = IGNORE
    return hidden, weight, labels


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("chunk_bytes", [ALL_AT_ONCE, 1, 4 * VOCAB * 4, 2**20])
def test_equals_whole_logits(chunk_bytes: int) -> None:
    hidden, weight, labels = inputs()
    loss, rows = ChunkedCrossEntropy(chunk_bytes)(hidden, weight, labels)
    (loss * 0.37).backward()
    expected, expected_rows, d_hidden, d_weight = reference(hidden, weight, labels, 0.37)
    assert loss.dtype == rows.dtype == torch.float32 and not rows.requires_grad
    assert hidden.grad is not None and weight.grad is not None
    assert relative(loss, expected) < 1e-6 and relative(rows, expected_rows) < 1e-6
    assert rows[2] == 0
    assert relative(hidden.grad, d_hidden) < 1e-6 and relative(weight.grad, d_weight) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_memory_not_values(dtype: torch.dtype) -> None:
    results = []
    for chunk_bytes in (ALL_AT_ONCE, 4 * VOCAB * 5, 1):
        hidden, weight, labels = inputs(dtype)
        loss, rows = ChunkedCrossEntropy(chunk_bytes)(hidden, weight, labels)
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        results.append((loss.detach(), rows, hidden.grad, weight.grad))
    # The weight gradient is summed in fp32 and rounded once, so bf16 may differ by its last bit where that sum is
    # close to the middle of two numbers.
    last = 1e-6 if dtype == torch.float32 else 2**-8
    for other in results[1:]:
        for index, tolerance in enumerate((1e-6, 1e-6, last, last)):
            assert relative(other[index], results[0][index]) < tolerance


def test_bf16_close_to_fp64() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    loss, _ = ChunkedCrossEntropy(4 * VOCAB * 5)(hidden, weight, labels)
    (loss * (1 / 1000)).backward()
    expected, _, d_hidden, d_weight = reference(hidden, weight, labels, 1 / 1000)
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert relative(loss, expected) < 3e-3  # logits are bf16
    assert relative(hidden.grad, d_hidden) < 1e-2 and relative(weight.grad, d_weight) < 1e-2


def test_factor_is_not_rounded_to_bf16() -> None:
    """1/1000 in bf16 is 0.17% off: every gradient would be."""
    hidden, weight, labels = inputs(torch.bfloat16)
    gradients: list[torch.Tensor] = []
    for factor in (1.0, 1 / 1000):
        hidden.grad = weight.grad = None
        loss, _ = ChunkedCrossEntropy()(hidden, weight, labels)
        (loss * factor).backward()
        assert weight.grad is not None
        gradients.append(weight.grad.float().abs().sum() / factor)
    assert abs(gradients[1] / gradients[0] - 1) < 2e-4


def test_no_target_gives_exact_zeros() -> None:
    hidden, weight, labels = inputs()
    loss, rows = ChunkedCrossEntropy(4 * VOCAB * 4)(hidden, weight, torch.full_like(labels, IGNORE))
    loss.backward()
    assert loss.item() == 0 and rows.tolist() == [0, 0, 0]
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.count_nonzero() == 0 and weight.grad.count_nonzero() == 0


def test_large_logits_stay_finite() -> None:
    hidden, weight, labels = inputs()
    with torch.no_grad():
        hidden.mul_(100)
    loss, _ = ChunkedCrossEntropy(4 * VOCAB * 4)(hidden, weight, labels)
    assert relative(loss, reference(hidden, weight, labels, 1.0)[0]) < 1e-6


def test_labels_outside_the_vocabulary_are_refused() -> None:
    hidden, weight, labels = inputs()
    for label in (VOCAB, -1):
        labels[1, 1] = label
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            ChunkedCrossEntropy()(hidden, weight, labels)


def test_without_gradient_nothing_is_kept() -> None:
    hidden, weight, labels = inputs()
    with torch.no_grad():
        loss, _ = ChunkedCrossEntropy(4 * VOCAB * 4)(hidden, weight, labels)
    assert not loss.requires_grad
    assert relative(loss, reference(hidden, weight, labels, 1.0)[0]) < 1e-6
    frozen = ChunkedCrossEntropy()(hidden.detach(), weight, labels)[0]
    frozen.backward()
    assert weight.grad is not None and hidden.grad is None


def test_backward_in_two_halves_equals_one() -> None:
    """Zero-bubble schedules ask for the input's gradient first and for the weight's later."""
    hidden, weight, labels = inputs()
    loss, _ = ChunkedCrossEntropy(4 * VOCAB * 4)(hidden, weight, labels)
    (first,) = torch.autograd.grad(loss * 3, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss * 3, weight)
    _, _, d_hidden, d_weight = reference(hidden, weight, labels, 3.0)
    assert relative(first, d_hidden) < 1e-6 and relative(second, d_weight) < 1e-6


def test_never_holds_more_logits_than_allowed() -> None:
    hidden, weight, labels = inputs()
    sizes: list[int] = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(out)
            sizes.extend(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
            return out

    with Largest():
        ChunkedCrossEntropy(4 * VOCAB * 5)(hidden, weight, labels)[0].backward()
    assert max(sizes) <= max(5 * VOCAB, VOCAB * DIM)
    assert max(sizes) < BATCH * SEQ * VOCAB


@pytest.mark.parametrize(
    ("tokens", "chunk_bytes", "chunks"), [(21, 0, 1), (21, 4 * VOCAB * 10, 3), (21, 1, 21)]
)
def test_chunk_count(tokens: int, chunk_bytes: int, chunks: int) -> None:
    assert ChunkedCrossEntropy(chunk_bytes).chunks(tokens, VOCAB) == chunks


def test_traces_into_one_graph() -> None:
    hidden, weight, labels = inputs()
    cross_entropy = ChunkedCrossEntropy(4 * VOCAB * 10)
    compiled = torch.compile(cross_entropy.__call__, backend="aot_eager", fullgraph=True)
    loss, rows = compiled(hidden, weight, labels)
    loss.backward()
    expected, expected_rows, d_hidden, d_weight = reference(hidden, weight, labels, 1.0)
    assert relative(loss, expected) < 1e-6 and relative(rows, expected_rows) < 1e-6
    assert hidden.grad is not None and weight.grad is not None
    assert relative(hidden.grad, d_hidden) < 1e-6 and relative(weight.grad, d_weight) < 1e-6
