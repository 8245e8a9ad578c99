"""Grouped products against a loop over experts: kernel and fallback, gradients, empty groups, tails, FLOPs, compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from titan5d.models.grouped_mm import grouped_mm, grouped_mm_weight, has_kernel

LAYOUTS = {
    "all used": [3, 7, 12, 20],
    "empty groups": [0, 9, 9, 20],
    "one hot expert": [0, 0, 20, 20],
    "a tail": [2, 5, 5, 11],
    "nothing but tail": [0, 0, 0, 0],
}


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN, so that reading what nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def loop(rows: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    parts = [
        rows[start:end] @ weight[e].T for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return torch.cat([*parts, rows.new_zeros(rows.shape[0] - ends[-1], weight.shape[1])])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "width", [16, 10], ids=["kernel", "fallback"]
)  # 10 floats are no multiple of 16 bytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_product_and_gradients_equal_a_loop(layout: str, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ends = LAYOUTS[layout]
    rows = torch.randn(20, width).to(dtype).requires_grad_()
    weight = torch.randn(4, 24, width).to(dtype).requires_grad_()
    upstream = torch.randn(20, 24).to(dtype)
    expected = torch.autograd.grad((loop(rows, weight, ends) * upstream).sum(), (rows, weight))
    out = grouped_mm(rows, weight, torch.tensor(ends, dtype=torch.int32), ends[-1] < 20)
    found = torch.autograd.grad((out * upstream).sum(), (rows, weight))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    for ours, theirs in zip((out, *found), (loop(rows, weight, ends), *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert (out[ends[-1] :] == 0).all() and (found[0][ends[-1] :] == 0).all()


def test_which_sizes_and_types_have_a_kernel() -> None:
    def kernel(width: int, dtype: torch.dtype) -> bool:
        return has_kernel(torch.zeros(2, width, dtype=dtype), torch.zeros(3, 8, width, dtype=dtype))

    assert kernel(16, torch.float32) and kernel(16, torch.bfloat16)
    assert not kernel(10, torch.float32) and not kernel(4, torch.bfloat16) and not kernel(16, torch.float64)


def test_no_rows_at_all() -> None:
    rows, weight = torch.zeros(0, 16, requires_grad=True), torch.randn(4, 24, 16, requires_grad=True)
    grouped_mm(rows, weight, torch.zeros(4, dtype=torch.int32), False).sum().backward()
    assert weight.grad is not None and (weight.grad == 0).all()


def test_an_expanded_gradient() -> None:
    rows, weight = torch.randn(20, 16, requires_grad=True), torch.randn(4, 24, 16)
    ends = torch.tensor(LAYOUTS["all used"], dtype=torch.int32)
    grouped_mm(rows, weight, ends, False).sum().backward()  # its gradient has stride 0
    expected = torch.autograd.grad(loop(rows, weight, ends.tolist()).sum(), rows)[0]
    torch.testing.assert_close(rows.grad, expected, rtol=1e-5, atol=1e-5)


def test_operators_obey_torchs_rules() -> None:
    """Schemas, fake kernels and autograd registration, as torch checks them."""
    rows, weight = torch.randn(20, 16, requires_grad=True), torch.randn(4, 24, 16, requires_grad=True)
    ends = torch.tensor(LAYOUTS["a tail"], dtype=torch.int32)
    torch.library.opcheck(grouped_mm, (rows, weight, ends, True))
    torch.library.opcheck(grouped_mm_weight, (torch.randn(20, 24), rows.detach(), ends))


def test_flops_are_counted() -> None:
    rows, weight = torch.randn(20, 16, requires_grad=True), torch.randn(4, 24, 16, requires_grad=True)
    ends = torch.tensor(LAYOUTS["all used"], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        grouped_mm(rows, weight, ends, False).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 20 * 16 * 24


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_compiled_and_on_meta(device: str) -> None:
    rows = torch.randn(20, 16, device=device, requires_grad=True)
    weight = torch.randn(4, 24, 16, device=device, requires_grad=True)
    ends = torch.tensor(LAYOUTS["a tail"], dtype=torch.int32, device=device)
    if device == "meta":
        grouped_mm(rows, weight, ends, True).sum().backward()
        assert rows.grad is not None and rows.grad.shape == (20, 16)
        return
    compiled = torch.compile(
        lambda r, w, e: grouped_mm(r, w, e, True).square().sum(), backend="aot_eager", fullgraph=True
    )
    found = torch.autograd.grad(compiled(rows, weight, ends), (rows, weight))
    expected = torch.autograd.grad(loop(rows, weight, ends.tolist()).square().sum(), (rows, weight))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
