"""A model is built on the meta device, cut there, and then gets memory: nothing of that may stay unwritten."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parity import TINY, Case, Outcome, close, reference, run_case
from titan5d.launch.local_ranks import run_ranks
from titan5d.models.decoder import Decoder
from titan5d.parallel.pipeline import PipelineModel
from titan5d.topology import Topology

TWO_LAYERS = replace(TINY, n_layers=2)


def frequencies_are_whole(model: Decoder) -> None:
    """The only buffer of a dense model: it is saved nowhere, so every rank computes it, in fp32."""
    expected = 10000.0 ** (-torch.arange(0, TINY.head_dim, 2) / TINY.head_dim)
    for part in model.stages.values() if isinstance(model, PipelineModel) else [model]:
        ((name, buffer),) = part.named_buffers()
        assert buffer.dtype == torch.float32, name
        assert torch.allclose(buffer, expected, rtol=1e-6, atol=0), name


def run_poisoned(case: Case) -> Outcome:
    """All memory that nobody writes is NaN, from before the model is built."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    return run_case(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topology", [Topology(dp_shard=2), Topology(tp=2), Topology(pp=2)], ids=str)
def test_nothing_stays_unwritten(topology: Topology, dtype: torch.dtype) -> None:
    """Case 031."""
    stage = 0 if topology.pp > 1 else 3
    case = Case(topology, args=TWO_LAYERS, stage=stage, dtype=dtype, prepare=frequencies_are_whole)
    for outcome in run_ranks(run_poisoned, 2, case, timeout=60):
        close(outcome.losses, reference(case).losses, 1e-6 if dtype == torch.float32 else 1e-3, "loss")
        assert all(weight.isfinite().all() for weight in outcome.weights.values())
