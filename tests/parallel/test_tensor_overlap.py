"""enable_async_tensor_parallel: torch's fused operators in place of collective and product.

The operators exist on CUDA only. Here they are stood in for by the reference that torch ships for them, which has
their arguments, shapes and meaning, so what is tested is how they are called.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch._dynamo  # the first custom operator imports it: once here instead of on each forked rank
import torch.distributed._symmetric_memory as symmetric_memory

from tests.parity import TINY, Case, Outcome, reference, relative_error, run_case
from titan5d.launch.local_ranks import run_ranks
from titan5d.parallel.tensor import TensorParallel
from titan5d.topology import Topology

CASE = Case(
    Topology(tp=2), args=replace(TINY, n_layers=2), tensor=TensorParallel(overlap=True), accumulation=2
)


def run_with_references(case: Case) -> tuple[Outcome, Counter[str]]:
    used: Counter[str] = Counter()

    def gather_then_multiply(*args, **kwargs):  # type: ignore[no-untyped-def]
        used["gather"] += 1
        return symmetric_memory._fused_all_gather_matmul_fallback(*args, **kwargs)

    def multiply_then_scatter(*args, **kwargs):  # type: ignore[no-untyped-def]
        used["scatter"] += 1
        return symmetric_memory._fused_matmul_reduce_scatter_fallback(*args, **kwargs)

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", gather_then_multiply, "CPU")
    library.impl("fused_matmul_reduce_scatter", multiply_then_scatter, "CPU")
    return run_case(case), used


@pytest.mark.parametrize("regather", [True, False])
def test_equals_one_process(regather: bool) -> None:
    case = replace(CASE, tensor=TensorParallel(overlap=True, regather_input=regather))
    expected = reference(case)
    for found, used in run_ranks(run_with_references, 2, case):
        # a layer and micro-batch: two gathers forward and two backward under products, two products under a scatter
        assert used == {"gather": 4 * 2 * 2, "scatter": 2 * 2 * 2}
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        for name, gradient in expected.gradients.items():
            assert relative_error(found.gradients[name], gradient) <= 1e-5, name
