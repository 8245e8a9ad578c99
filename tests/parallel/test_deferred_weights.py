"""The deferred half of backward: what waits, that it is made once, and that it is what autograd would have made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.parity import TINY, relative_error
from titan5d.config.schema_execution import ActivationCheckpoint
from titan5d.models.decoder import Decoder
from titan5d.parallel.deferred_weights import WeightGradientStore, defer_weight_gradients
from titan5d.parallel.recompute import apply_recompute

ARGS = replace(TINY, n_layers=2, attention_bias=True)


def model(store: WeightGradientStore | None, recompute: str = "none", compiled: bool = False) -> Decoder:
    torch.manual_seed(3)
    decoder = Decoder(ARGS)
    decoder.init_buffers("cpu")
    if store is not None:
        defer_weight_gradients(decoder, store, compiled)
    apply_recompute(decoder, ActivationCheckpoint(mode=recompute), compiled)  # type: ignore[arg-type]
    if compiled:
        for block in decoder.layers.values():
            block.compile(backend="aot_eager", fullgraph=True)
    return decoder


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return (
        torch.randint(256, (2, 16), generator=generator),
        torch.randint(256, (2, 16), generator=generator),
    )


def loss(decoder: Decoder, index: int) -> torch.Tensor:
    tokens, labels = batch(index)
    return decoder(tokens, None, None, labels)[0]


def gradients(decoder: Decoder) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in decoder.named_parameters()}


def assert_same(found: Decoder, expected: Decoder) -> None:
    for name, grad in gradients(expected).items():
        ours = gradients(found)[name]
        assert ours is not None and grad is not None
        assert relative_error(ours, grad) < 1e-5, name


@pytest.fixture(scope="module")
def expected() -> Decoder:
    plain = model(None)
    for index in (0, 1):
        loss(plain, index).backward()
    return plain


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_two_micro_batches_in_flight(expected: Decoder, recompute: str, compiled: bool) -> None:
    store = WeightGradientStore()
    ours = model(store, recompute, compiled)
    first, second = loss(ours, 0), loss(ours, 1)
    with store.putting_off((0, 0)):
        first.backward()
    with store.putting_off((0, 1)):
        second.backward()
    linears = {
        f"{name}.weight" for name, m in ours.layers.named_modules(prefix="layers") if isinstance(m, nn.Linear)
    }
    assert len(linears) == 14
    assert {name for name, grad in gradients(ours).items() if grad is None} == linears
    assert len(store) == 2
    store.run((0, 1))  # in another order than they came
    store.run((0, 0))
    assert len(store) == 0
    assert_same(ours, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_whole_backward_puts_nothing_off(expected: Decoder, compiled: bool) -> None:
    store = WeightGradientStore()
    ours = model(store, compiled=compiled)
    loss(ours, 0).backward()
    assert len(store) == 0
    loss(ours, 1).backward()
    assert_same(ours, expected)


def test_one_graph_serves_every_layer() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    store = WeightGradientStore()
    ours = model(store, compiled=True)
    loss(ours, 0).backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with store.putting_off((0, 0)):
        loss(ours, 1).backward()
    store.run((0, 0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs == 1


def test_what_waits_is_freed_piece_by_piece() -> None:
    store = WeightGradientStore()
    left = []
    with store.putting_off((0, 0)):
        for _ in range(3):
            store.put_off(lambda: left.append(len(store)))
    store.run((0, 0))
    assert left == [0, 0, 0]


def test_without_gradients_the_products_are_the_plain_ones() -> None:
    store = WeightGradientStore()
    ours, plain = model(store), model(None)
    tokens, _ = batch(0)
    with torch.no_grad():
        assert torch.equal(ours(tokens), plain(tokens))
