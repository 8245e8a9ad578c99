"""The decoder: documents, positions, pipeline stages, loss, compile, meta device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.models.init import init_weights_

TINY = ModelArgs(dim=64, n_layers=3, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=256)


def build(args: ModelArgs = TINY) -> Decoder:
    model = Decoder(args)
    init_weights_(model, 0)
    return model


def tokens(batch: int = 2, seq: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (batch, seq), generator=torch.Generator().manual_seed(seed))


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert (ours[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_loss_and_gradients_equal_cross_entropy_of_the_logits() -> None:
    model, ids, labels = build(), tokens(), tokens(seed=1)
    labels[0, :5] = -100
    loss, rows = model(ids, labels=labels)
    loss.backward()
    ours = gradients(model)
    model.zero_grad()
    logits = model(ids)
    assert logits.shape == (2, 16, 256)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    losses.sum().backward()
    torch.testing.assert_close(loss, losses.sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(rows, losses.view(2, 16).sum(1).detach(), rtol=1e-6, atol=0)
    assert_same(ours, gradients(model))


@pytest.mark.parametrize("restart_positions", [False, True])
def test_packed_documents_equal_documents_alone(restart_positions: bool) -> None:
    model = build()
    lengths = [5, 1, 10]
    row, labels = tokens(1, 16), tokens(1, 16, seed=1)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).int()[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None] if restart_positions else None
    loss, _ = model(row, positions, ids, labels)
    loss.backward()
    packed, packed_logits = gradients(model), model(row, positions, ids)
    model.zero_grad()
    total, start = torch.zeros(()), 0
    for n in lengths:
        part = slice(start, start + n)
        alone, _ = model(row[:, part], labels=labels[:, part])
        alone.backward()
        total += alone.detach()
        torch.testing.assert_close(packed_logits[:, part], model(row[:, part]), rtol=1e-5, atol=1e-5)
        start += n
    torch.testing.assert_close(loss.detach(), total, rtol=1e-6, atol=0)
    assert_same(packed, gradients(model))


def test_documents_change_the_result_and_one_document_does_not() -> None:
    """The comparison above could not fail if the mask were ignored altogether; here it would."""
    model, row = build(), tokens(1, 16)
    one = torch.zeros(1, 16, dtype=torch.int32)
    two = torch.tensor([[0] * 8 + [1] * 8])
    torch.testing.assert_close(model(row, None, one), model(row), rtol=1e-5, atol=1e-5)
    assert (model(row, None, two)[:, 8:] - model(row)[:, 8:]).abs().max() > 0.01
    torch.testing.assert_close(model(row, None, two)[:, :8], model(row)[:, :8], rtol=1e-5, atol=1e-5)


def test_later_tokens_do_not_reach_earlier_ones() -> None:
    model, row = build(), tokens(1, 16)
    changed = row.clone()
    changed[0, 9] += 1
    difference = (model(row) - model(changed)).abs().amax(-1)[0]
    assert difference[:9].max() == 0 and difference[9:].min() > 0


def test_mask_is_made_once_per_forward() -> None:
    model, calls = build(), []
    make = model.prepare_mask
    model.prepare_mask = lambda ids: calls.append(ids) or make(ids)  # type: ignore[func-returns-value]
    model(tokens(), None, torch.zeros(2, 16, dtype=torch.int32))
    assert len(calls) == 1


def test_stages_in_a_row_equal_the_whole() -> None:
    whole, ids, labels = build(), tokens(), tokens(seed=1)
    expected, _ = whole(ids, labels=labels)
    expected.backward()
    first, last = build(), build()
    first.norm = first.output = None
    del first.layers["2"]
    last.tok_embeddings = None
    del last.layers["0"], last.layers["1"]
    hidden = first(ids, labels=labels)  # labels reach every stage; only the last makes use of them
    assert hidden.shape == (2, 16, 64)
    loss, _ = last(hidden, labels=labels)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert_same(gradients(first) | gradients(last), gradients(whole))
    assert set(gradients(first)).isdisjoint(gradients(last))


@pytest.mark.parametrize("args", [TINY, replace(TINY, tie_embeddings=True)], ids=["untied", "tied"])
def test_meta_start_equals_direct_start(args: ModelArgs) -> None:
    with torch.device("meta"):
        model = Decoder(args)
    model.to_empty(device="cpu")
    assert model.tok_embeddings is not None and model.output is not None
    assert (model.output.weight is model.tok_embeddings.weight) == args.tie_embeddings
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    init_weights_(model, 0)
    model.init_buffers("cpu")
    direct = build(args)
    for name, parameter in direct.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert torch.equal(model(tokens()), direct(tokens()))


def test_tied_gradient_is_the_sum_of_both_uses() -> None:
    tied, ids, labels = build(replace(TINY, tie_embeddings=True)), tokens(), tokens(seed=1)
    untied = build()
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        model(ids, labels=labels)[0].backward()
    ours, parts = gradients(tied), gradients(untied)
    parts["tok_embeddings.weight"] += parts.pop("output.weight")
    assert_same(ours, parts)


def test_bf16_weights_make_bf16_activations_and_fp32_rotation_and_loss() -> None:
    model, ids, labels = build().to(torch.bfloat16), tokens(), tokens(seed=1)
    assert model.rope.inverse_frequencies.dtype == torch.float32
    seen: list[torch.dtype] = []
    model.layers["0"].register_forward_pre_hook(
        lambda block, inputs: seen.extend(x.dtype for x in inputs[:3])
    )
    loss, rows = model(ids, labels=labels)
    loss.backward()
    assert seen == [torch.bfloat16, torch.float32, torch.float32]
    assert loss.dtype == rows.dtype == torch.float32
    exact, _ = build()(ids, labels=labels)
    assert abs(loss - exact) / exact < 3e-3
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients(model).values())


def test_block_compiles_into_one_graph() -> None:
    model, ids, labels = build(), tokens(), tokens(seed=1)
    documents = torch.tensor([[0] * 8 + [1] * 8, [0] * 16])
    model(ids, None, documents, labels)[0].backward()
    expected = gradients(model)
    model.zero_grad()
    for block in model.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    model(ids, None, documents, labels)[0].backward()
    assert_same(gradients(model), expected)
