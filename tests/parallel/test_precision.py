"""bf16 compute with fp32 masters and fp32 sums, and the training state in CPU memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parallel.test_data_ledger import CPU, start
from tests.parity import Case, assert_parity, close, layout, reference
from titan5d.launch.local_ranks import run_ranks
from titan5d.parallel.data import before_microbatch
from titan5d.topology import Topology
from titan5d.train.loss import normalized
from titan5d.train.step import forward

BF16 = Case(Topology(dp_shard=2), dtype=torch.bfloat16, accumulation=2, documents=True, lr=0.1)


def _types(case: Case) -> dict[str, set[torch.dtype]]:
    """The types that meet in a step: of blocks' inputs, rotary tables, gradients, weights, optimizer state."""
    run = start(case)
    seen: dict[str, set[torch.dtype]] = {name: set() for name in ("hidden", "rotary", "compute")}

    def look(block: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        hidden, cos, sin, *_ = inputs
        seen["hidden"].add(hidden.dtype)
        seen["rotary"] |= {cos.dtype, sin.dtype}
        seen["compute"] |= {parameter.dtype for parameter in block.parameters()}  # gathered by now, if ever

    for block in run.model.layers.values():
        block.register_forward_pre_hook(look)
    for index, batch in enumerate(run.batches):
        before_microbatch(run.model, case.stage, last=index == len(run.batches) - 1)
        normalized(forward(run.model, batch, CPU)[0], 100).backward()
    run.optimizer.step()
    parameters = list(run.model.parameters())
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    return {
        **seen,
        "weights": {parameter.dtype for parameter in parameters},
        "gradients": {parameter.grad.dtype for parameter in parameters},
        "optimizer": {state.dtype for state in states},
    }


@pytest.mark.parametrize("stage", range(4))
def test_what_is_summed_and_stored_is_fp32(stage: int) -> None:
    for seen in run_ranks(_types, 2, replace(BF16, stage=stage)):
        assert seen.pop("hidden") == {torch.bfloat16}
        # where nothing is gathered, each layer rounds its weights as it uses them
        assert seen.pop("compute") == {torch.float32 if stage == 0 else torch.bfloat16}
        assert all(types == {torch.float32} for types in seen.values()), seen


@pytest.mark.parametrize("stage", range(4))
def test_bf16_on_two_ranks_agrees_with_one(stage: int) -> None:
    """Each rank rounds its own sums over tokens to bf16, so single gradients differ by a few of its steps of 2^-8."""
    case = replace(BF16, stage=stage)
    assert_parity(case, loss=2e-3, gradient=1e-2)
    for outcome in layout(case):
        close(outcome.norms, reference(case).norms, 2e-3, "norm")


def test_bf16_is_close_to_fp32() -> None:
    exact = reference(replace(BF16, dtype=torch.float32, steps=3))
    for outcome in layout(replace(BF16, steps=3)):
        close(outcome.losses, exact.losses, 1e-2, "bf16 loss")
        close(outcome.norms, exact.norms, 1e-2, "bf16 norm")
        assert outcome.losses != exact.losses  # it did compute in bf16


@pytest.mark.parametrize("stage", range(4))
def test_state_in_cpu_memory_trains_the_same(stage: int) -> None:
    assert_parity(Case(Topology(dp_shard=2), stage, 2, cpu_offload=True, steps=2, lr=0.1))


def test_state_in_cpu_memory_on_one_rank_and_with_replicas() -> None:
    assert_parity(Case(stage=0, cpu_offload=True, steps=2, lr=0.1))
    assert_parity(Case(Topology(dp_replicate=2, dp_shard=2), 3, 2, cpu_offload=True, steps=2, lr=0.1))
