"""Recompute: what each mode keeps, against plan/memory.py; what it runs again; and that gradients do not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity import TINY, Case, assert_parity, micro_batches, relative_error
from titan5d.config.schema_execution import ActivationCheckpoint
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.memory_ledger import MemoryLedger
from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.parallel.compile import apply_compile
from titan5d.parallel.initialize import initialize
from titan5d.parallel.recompute import apply_recompute
from titan5d.plan.memory import layer_activation_bytes
from titan5d.topology import Topology
from titan5d.train.step import forward

NONE = ActivationCheckpoint()
FULL = ActivationCheckpoint(mode="full")
PRODUCTS = ActivationCheckpoint(mode="selective", selective_ac_option="op")
EVERY_SECOND = ActivationCheckpoint(mode="selective", selective_ac_option="2")
MODES = {"none": NONE, "full": FULL, "op": PRODUCTS, "2": EVERY_SECOND}

# Each kind of weight has its own shape: wq 96 x 64, wk and wv 48 x 64, wo 64 x 96, w1 and w3 128 x 64, w2 64 x 128
ARGS = replace(TINY, n_heads=4, n_kv_heads=2, head_dim=24)
TOKENS = 4 * 64
CASE = Case(valid=(64,) * 4, args=ARGS)


def decoder(
    recompute: ActivationCheckpoint,
    args: ModelArgs = ARGS,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Decoder], None] | None = None,
) -> Decoder:
    model = Decoder(args).to(dtype)
    initialize(model, 5)
    if change is not None:
        change(model)
    apply_recompute(model, recompute)
    return model


def loss_of(model: Decoder, args: ModelArgs = ARGS) -> Tensor:
    batch = micro_batches(replace(CASE, args=args), 0, 0)[0]
    return forward(model, batch, torch.device("cpu"))[0]


def kept_bytes(recompute: ActivationCheckpoint, dtype: torch.dtype = torch.float32, layers: int = 2) -> float:
    """Bytes that one block, on average, keeps from forward to backward: what `layers` more of them add."""

    def kept(n_layers: int) -> int:
        args = replace(ARGS, n_layers=n_layers)
        model = decoder(recompute, args, dtype)
        with MemoryLedger(model) as ledger:
            loss = loss_of(model, args)
            activations = ledger.now().activations
            loss.backward()
        return activations

    return (kept(2 * layers) - kept(layers)) / layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "formula"), [("none", "none"), ("full", "full"), ("op", "selective")])
def test_a_block_keeps_its_closed_form(name: str, formula: str, dtype: torch.dtype) -> None:
    expected = layer_activation_bytes(ARGS, TOKENS, dtype.itemsize, formula)
    assert kept_bytes(MODES[name], dtype) == pytest.approx(expected, rel=1e-3)


def test_every_second_block_is_recomputed() -> None:
    whole, least = (layer_activation_bytes(ARGS, TOKENS, 4, mode) for mode in ("none", "full"))
    assert kept_bytes(EVERY_SECOND) == pytest.approx((whole + least) / 2, rel=1e-3)


def test_products_named_in_the_list_are_recomputed() -> None:
    """q is 96 wide; the other products, which have other shapes, are still kept."""
    without_q = replace(PRODUCTS, per_op_sac_force_recompute_mm_shapes_by_fqns=["attention.wq"])
    assert kept_bytes(PRODUCTS) - kept_bytes(without_q) == TOKENS * 96 * 4


def test_the_last_product_is_kept_when_recomputing_runs_to_the_end() -> None:
    to_the_end = replace(PRODUCTS, early_stop=False)
    assert kept_bytes(to_the_end) - kept_bytes(PRODUCTS) == TOKENS * ARGS.dim * 4


class Operators(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recompute", "products", "attentions"),
    [
        (NONE, 0, 0),
        (FULL, 6, 1),  # all but the last product, whose output nothing needs
        (replace(FULL, early_stop=False), 7, 1),
        (PRODUCTS, 0, 1),
        (
            replace(PRODUCTS, per_op_sac_force_recompute_mm_shapes_by_fqns=["wq", "w1"]),
            3,
            1,
        ),  # and w3, shaped as w1
    ],
    ids=["none", "full", "full to the end", "op", "op without wq and w1"],
)
def test_what_backward_runs_again(recompute: ActivationCheckpoint, products: int, attentions: int) -> None:
    def backward_runs(config: ActivationCheckpoint) -> Counter[str]:
        loss = loss_of(decoder(config))
        with Operators() as operators:
            loss.backward()
        return operators.ran

    again = backward_runs(recompute)
    again.subtract(backward_runs(NONE))
    assert again["mm"] == products * ARGS.n_layers
    assert again["_scaled_dot_product_flash_attention_for_cpu"] == attentions * ARGS.n_layers


def gradients(
    recompute: ActivationCheckpoint, change: Callable[[Decoder], None] | None = None
) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = decoder(recompute, change=change)
    torch.manual_seed(8)  # of dropout
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert ours.keys() == theirs.keys()  # recompute changes no name
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("name", ["full", "op", "2"])
def test_gradients_have_the_same_bits(name: str) -> None:
    assert same_bits(gradients(MODES[name]), gradients(NONE))


def _with_dropout(model: Decoder) -> None:
    for block in model.layers.values():
        block.feed_forward = nn.Sequential(block.feed_forward, nn.Dropout(0.5))
        block.attention_norm = nn.Sequential(block.attention_norm, nn.Dropout(0.5))


@pytest.mark.parametrize("name", ["full", "op", "2"])
def test_random_numbers_are_drawn_again(name: str) -> None:
    expected = gradients(NONE, _with_dropout)
    assert same_bits(gradients(MODES[name], _with_dropout), expected)
    forgetful = replace(MODES[name], preserve_rng_state=False)
    assert not same_bits(gradients(forgetful, _with_dropout), expected)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("mode", "option"), [("full", "op"), ("selective", "op"), ("selective", "2")])
def test_parity_on_two_ranks(mode: str, option: str, stage: int) -> None:
    assert_parity(Case(Topology(dp_shard=2), stage, 2, recompute=mode, selective=option, documents=True))


ONE_LAYER = replace(ARGS, n_layers=1)


def _budget(share: float) -> tuple[int, dict[str, Tensor]]:
    """Bytes that are live between forward and backward of compiled blocks, and all gradients."""
    model = decoder(ActivationCheckpoint(mode="memory_budget", memory_budget=share), ONE_LAYER)
    apply_compile(model, ["model"], "aot_eager")
    loss_of(model, ONE_LAYER).backward()  # compiles
    model.zero_grad()
    with MemoryLedger(model) as ledger:
        loss = loss_of(model, ONE_LAYER)
        kept = ledger.now().activations
        loss.backward()
    return kept, {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.slow
def test_the_compiler_keeps_the_budget() -> None:
    """0 keeps least, 1 keeps most, whatever is kept gradients are the same."""
    shares = (0.0, 0.5, 1.0)
    kept, found = zip(*(run_ranks(_budget, 1, share)[0] for share in shares), strict=True)
    assert kept[0] < kept[1] < kept[2]
    plain = decoder(NONE, ONE_LAYER)
    loss_of(plain, ONE_LAYER).backward()
    for ours in found:
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert relative_error(ours[name], parameter.grad) < 1e-6, name
