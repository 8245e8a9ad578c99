"""Products in 8 bits where there is nothing to scale, and beside sizes that are not converted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.parallel.test_low_precision import ONE, PLANS, TENSORWISE, trained
from tests.parity import TINY
from titan5d.launch.local_ranks import run_ranks
from titan5d.models.decoder import Decoder
from titan5d.parallel.low_precision import LowPrecision, apply_low_precision

ODD = replace(TINY, n_layers=2, vocab_size=257, ffn_dim=136)


@pytest.mark.parametrize("name", PLANS)
def test_zeros_stay_zero(name: str) -> None:
    """Case 076: a batch of zero vectors has no largest element to scale by; logits are 0, so the loss is log(V)."""
    torch.manual_seed(0)
    model = Decoder(replace(ODD, ffn_dim=128))
    model.init_buffers("cpu")
    model = model.bfloat16()
    assert apply_low_precision(model, PLANS[name])
    assert model.tok_embeddings is not None
    with torch.no_grad():
        model.tok_embeddings.weight[:7] = 0
    tokens = torch.arange(32).remainder(7).view(1, 32)
    loss, _ = model(tokens, labels=tokens)
    assert loss.item() / 32 == pytest.approx(math.log(257), rel=1e-3)
    loss.backward()
    for parameter, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), parameter


@pytest.mark.parametrize(
    "plan", [TENSORWISE, LowPrecision("float8", "rowwise", emulate=True)], ids=["tensor", "row"]
)
def test_sizes_that_are_not_converted_train_along(plan: LowPrecision) -> None:
    """Case 076: a feed-forward of 136 and a head of 257; 20 steps within 5 % of bf16."""
    case = replace(ONE, args=ODD)
    ((losses, _),) = run_ranks(trained, 1, case, plan, 20)
    ((expected, _),) = run_ranks(trained, 1, case, None, 20)
    assert losses != expected and losses == pytest.approx(expected, rel=0.05)
