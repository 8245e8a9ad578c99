"""Layers of experts against a loop over tokens; idle experts; padding; capacity; recompute; compile; counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from titan5d.metrics.flops import flop_shape, flops_per_token
from titan5d.models.args import Balance, ModelArgs, count_parameters
from titan5d.models.decoder import Decoder
from titan5d.models.init import init_specs, init_weights_
from titan5d.models.moe import MoE

TINY_M = ModelArgs(
    dim=64,
    n_layers=4,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=128,
    vocab_size=256,
    n_experts=8,
    top_k=2,
    moe_ffn_dim=64,
    n_shared_experts=1,
)
"""The model of the public cases: TINY-D with each feed-forward replaced by 8 routed experts and a shared one."""
BALANCED = Balance(aux_loss_coefficient=0.01, z_loss_coefficient=0.001, bias_update_rate=0.001)


def layer(args: ModelArgs = TINY_M, seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(args)
    torch.nn.init.normal_(moe.router.weight)
    return moe


def model(args: ModelArgs = TINY_M) -> Decoder:
    decoder = Decoder(args)
    init_weights_(decoder, 0)
    return decoder


def hidden(rows: int = 2, seq: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, seq, 64, generator=torch.Generator().manual_seed(seed))


def tokens(rows: int = 2, seq: int = 64, seed: int = 1) -> torch.Tensor:
    return torch.randint(256, (rows, seq), generator=torch.Generator().manual_seed(seed))


def one_by_one(moe: MoE, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
    """The definition: for each token the weighted sum of its experts, in a loop."""
    experts, weights = moe.router(x, padding)
    w = moe.experts
    out = torch.zeros_like(x) if moe.shared_experts is None else moe.shared_experts(x)
    rows = []
    for row in range(x.shape[0]):
        for place in range(x.shape[1]):
            total, token = out[row, place], x[row, place]
            for e, weight in zip(experts[row, place].tolist(), weights[row, place], strict=True):
                if e < moe.router.n_experts:
                    hidden = torch.nn.functional.silu(w.w1[e] @ token) * (w.w3[e] @ token)
                    total = total + weight * (w.w2[e] @ hidden)
            rows.append(total)
    return torch.stack(rows).view_as(x)


def gradients(module: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss.backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def assert_same(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert (ours[name] - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-30), name


VARIANTS = {
    "plain": TINY_M,
    "no shared expert": replace(TINY_M, n_shared_experts=0),
    "score before w2": replace(TINY_M, balance=Balance(score_before_w2=True)),
    "capacity": replace(TINY_M, balance=Balance(capacity_factor=0.75)),
    "capacity, score before w2": replace(TINY_M, balance=Balance(capacity_factor=0.75, score_before_w2=True)),
    "top 1": replace(TINY_M, top_k=1, router_normalize=False),
    "all experts": replace(TINY_M, top_k=8),
    "sizes without a kernel": replace(TINY_M, moe_ffn_dim=10),
    "sigmoid, groups": replace(
        TINY_M, router_score="sigmoid", n_expert_groups=4, n_limited_groups=2, router_scale=2.5
    ),
}


@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_output_and_gradients_equal_a_loop_over_tokens(name: str, with_padding: bool) -> None:
    moe, x = layer(VARIANTS[name]), hidden().requires_grad_()
    padding = torch.zeros(2, 16, dtype=torch.bool)
    padding[1, 9:] = with_padding
    upstream = hidden(seed=2)
    runs: list[Callable[[], torch.Tensor]] = [
        lambda: moe(x, padding if with_padding else None),
        lambda: one_by_one(moe, x, padding if with_padding else None),
    ]
    outs, grads, grads_x = [], [], []
    for run in runs:
        x.grad = None
        outs.append(run())
        grads.append(gradients(moe, (outs[-1] * upstream).sum()))
        assert x.grad is not None
        grads_x.append({"x": x.grad})
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)
    assert_same(grads[0], grads[1])
    assert_same(grads_x[0], grads_x[1])
    assert all(grad.abs().max() > 0 for grad in grads[0].values())


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3], [5]], ids=["half", "one hot expert"])
def test_experts_without_tokens_get_zero_and_stay_as_they_are(chosen: list[int]) -> None:
    """Case 069: zero, not missing, gradients; SGD leaves their weights untouched bit by bit."""
    args = replace(TINY_M, n_layers=2, router_score="sigmoid", top_k=min(2, len(chosen)))
    decoder = model(args)
    for router in decoder.routers().values():
        router.bias.fill_(-1e4)
        router.bias[chosen] = 0.0
    before = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    ids = tokens()
    decoder(ids, labels=ids)[0].backward()
    torch.optim.SGD(decoder.parameters(), lr=1.0).step()
    idle = [e for e in range(8) if e not in chosen]
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        if ".experts." in name and "shared" not in name:
            assert (parameter.grad[idle] == 0).all() and (parameter[idle] == before[name][idle]).all(), name
            assert all((parameter[e] != before[name][e]).any() for e in chosen), name
    for router in decoder.routers().values():
        assert router.step_counts[idle].sum() == 0


def test_a_single_token() -> None:
    decoder = model()
    ids = tokens(1, 1)
    assert_same(
        gradients(decoder, decoder(ids, labels=ids)[0]),
        gradients(decoder, decoder(torch.cat((ids, ids)), labels=torch.cat((ids, 0 * ids - 100)))[0]),
    )


def test_nothing_unwritten_is_read() -> None:
    """Fresh memory holds NaN; padding and dropped choices leave rows that no expert writes."""
    torch.use_deterministic_algorithms(True)
    try:
        decoder = model(replace(TINY_M, n_layers=2, balance=replace(BALANCED, capacity_factor=0.5)))
        ids = tokens()
        documents = torch.zeros_like(ids)
        documents[:, 40:] = -1
        for router in decoder.routers().values():
            router.begin_step(80, 2, 1)
        for grad in gradients(decoder, decoder(ids, None, documents, ids)[0]).values():
            assert grad.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("capacity_factor", [0.0, 1.0])
def test_padding_changes_nothing(capacity_factor: float) -> None:
    """Case 071: rows of 40 tokens and 24 places of padding against the same rows cut to 40."""
    args = replace(TINY_M, n_layers=2, balance=replace(BALANCED, capacity_factor=capacity_factor))
    ids, labels = tokens(4), tokens(4, seed=2)
    labels[:, 40:] = -100
    documents = torch.zeros(4, 64, dtype=torch.int32)
    documents[:, 40:] = -1
    found = {}
    for name, inputs in {
        "padded": (ids, None, documents, labels),
        "cut": (ids[:, :40], None, None, labels[:, :40]),
    }.items():
        decoder = model(args)
        for router in decoder.routers().values():
            router.begin_step(160, 4, 1)
        loss, _ = decoder(*inputs)
        grads = gradients(decoder, loss)
        statistics = []
        for router in decoder.routers().values():
            assert router.step_counts[:8].sum() == 160 * 2
            statistics.append((router.step_counts.clone(), router.step_sums.clone()))
            router.end_step(router.step_counts[:8].clone(), updated=True)
        biases = torch.stack([router.bias for router in decoder.routers().values()])
        assert biases.abs().max() == 0.001
        found[name] = (loss.detach(), grads, statistics, biases)
    padded, cut = found["padded"], found["cut"]
    torch.testing.assert_close(padded[0], cut[0], rtol=1e-6, atol=0)
    assert_same(padded[1], cut[1])
    for (counts, sums), (counts_cut, sums_cut) in zip(padded[2], cut[2], strict=True):
        assert (counts == counts_cut).all()
        torch.testing.assert_close(sums, sums_cut, rtol=1e-5, atol=0)
    assert (padded[3] == cut[3]).all()
    assert (padded[2][0][0][8] > 0) == (capacity_factor > 0)  # something was dropped


def step(decoder: Decoder, ids: torch.Tensor, pieces: int) -> dict[str, torch.Tensor]:
    """Gradients of one optimizer step in so many micro-batches; the biases move."""
    for router in decoder.routers().values():
        router.begin_step(ids.numel(), ids.shape[0], pieces)
    decoder.zero_grad()
    for part in ids.chunk(pieces):
        decoder(part, labels=part)[0].backward()
    for router in decoder.routers().values():
        assert router.step_counts[:8].sum() == ids.numel() * 2
        router.end_step(router.step_counts[:8].clone(), updated=True)
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pieces", [1, 4])
def test_one_bias_update_a_step_however_it_is_run(pieces: int, recompute: bool) -> None:
    """Case 065 on one device: 1,024 choices a layer and step, and one move of the bias, however often a block runs."""
    args = replace(TINY_M, n_layers=2, balance=BALANCED)
    reference, decoder = model(args), model(args)
    if recompute:
        for block in decoder.layers.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for number in range(3):
        ids = tokens(8, seed=number)
        assert_same(step(decoder, ids, pieces), step(reference, ids, 1))
        for ours, theirs in zip(decoder.routers().values(), reference.routers().values(), strict=True):
            assert (ours.bias == theirs.bias).all() and (ours.load == theirs.load).all()
            assert theirs.load.sum() == 1024
    biases = torch.stack([router.bias for router in decoder.routers().values()])
    assert biases.abs().max() == pytest.approx(0.003)


def test_validation_and_shape_probes_count_nothing() -> None:
    decoder = model()
    ids = tokens()
    with torch.no_grad():
        decoder(ids)
    decoder.eval()
    decoder(ids, labels=ids)[0].backward()
    assert all((router.step_counts == 0).all() for router in decoder.routers().values())


def test_compiled_blocks_equal_eager() -> None:
    args = replace(TINY_M, n_layers=2, balance=replace(BALANCED, capacity_factor=1.0))
    eager, compiled = model(args), model(args)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # other tests of this process have counted too
    for block in compiled.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    for number in range(2):
        ids = tokens(4, seed=number)
        documents = torch.zeros_like(ids)
        documents[:, 50 - 10 * number :] = -1  # another count of tokens: no new graph
        grads = []
        for decoder in (compiled, eager):
            for router in decoder.routers().values():
                router.begin_step(200 - 40 * number, 4, 1)
            grads.append(gradients(decoder, decoder(ids, None, documents, ids)[0]))
        assert_same(*grads)
    for ours, theirs in zip(compiled.routers().values(), eager.routers().values(), strict=True):
        assert (ours.step_counts == theirs.step_counts).all() and ours.step_counts.sum() > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_bf16_keeps_the_router_in_fp32() -> None:
    decoder = model().bfloat16()
    router = decoder.routers()["0"]
    seen = {}
    router.register_forward_hook(
        lambda module, inputs, out: seen.update(x=inputs[0].dtype, weights=out[1].dtype)
    )
    ids = tokens()
    loss, _ = decoder(ids, labels=ids)
    loss.backward()
    assert seen == {"x": torch.bfloat16, "weights": torch.float32} and router.bias.dtype == torch.float32
    exact, _ = model()(ids, labels=ids)
    assert abs(loss - exact) / exact < 2e-3


def test_score_before_w2_keeps_less_for_backward() -> None:
    """Where experts are narrower than the stream: rows x dim less, in this layer 2 x 64 x 64 floats of two slots."""

    def kept(before: bool) -> int:
        moe = layer(
            replace(TINY_M, moe_ffn_dim=16, n_shared_experts=0, balance=Balance(score_before_w2=before))
        )
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            moe(hidden(2, 64).requires_grad_())
        return sum(storages.values())

    rows = 2 * 64 * 2
    assert kept(False) - kept(True) >= rows * 64 * 4 - rows * 16


def test_tiny_m_parameters_and_flops() -> None:
    """Case 078."""
    count = count_parameters(TINY_M)
    assert (count.total, count.active) == (526_912, 232_000)
    shape = flop_shape(TINY_M)
    assert flops_per_token(shape, 64, "full") == pytest.approx(1_490_304, rel=0.01)
    # counted on the products that are really run: forward, one row of 64 tokens
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model().eval()(tokens(1))
    products = counter.get_flop_counts()["Global"]
    attention = sum(flops for op, flops in products.items() if "attention" in str(op))
    assert sum(products.values()) - attention == 2 * 64 * count.matmul


@pytest.mark.parametrize("name", VARIANTS)
def test_counts_and_init_cover_every_parameter(name: str) -> None:
    for args in (VARIANTS[name], replace(VARIANTS[name], n_dense_layers=1)):
        decoder = Decoder(args)
        count = count_parameters(args)
        assert count.total == sum(parameter.numel() for parameter in decoder.parameters())
        assert count.layer == sum(parameter.numel() for parameter in decoder.layers["3"].parameters())
        assert set(init_specs(args)) == {name for name, _ in decoder.named_parameters()}
        experts = sum(
            parameter.numel() for name, parameter in decoder.named_parameters() if ".experts.w" in name
        )
        assert count.total - count.active == experts * (8 - args.top_k) // 8


def test_from_the_meta_device_the_state_starts_at_zero() -> None:
    with torch.device("meta"):
        decoder = Decoder(TINY_M).bfloat16()
    decoder.to_empty(device="cpu")
    for router in decoder.routers().values():
        router.bias.fill_(float("nan"))
    decoder.init_buffers("cpu")
    for router in decoder.routers().values():
        assert (router.bias == 0).all() and router.bias.dtype == torch.float32
        assert (router.load == 0).all() and (router.step_counts == 0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 9}, "model.top_k = 9, but a token can reach 8 experts"),
        ({"top_k": 0}, "model.top_k = 0"),
        ({"n_expert_groups": 3}, r"n_expert_groups = 3 .* one of 1, 2, 4, 8 for 8 experts"),
        ({"n_expert_groups": 4, "n_limited_groups": 5}, "n_limited_groups = 5"),
        (
            {"n_expert_groups": 4, "n_limited_groups": 1, "top_k": 3},
            r"top_k = 3, .* reach 2 experts \(1 of 4 groups",
        ),
        ({"moe_ffn_dim": 0}, "moe_ffn_dim = 0"),
        ({"n_dense_layers": 4}, "n_dense_layers = 4 leaves none"),
        ({"router_scale": 0.0}, "router_scale = 0.0"),
        ({"balance": Balance(capacity_factor=-1.0)}, "moe.capacity_factor = -1.0"),
        (
            {"n_experts": 0, "moe_ffn_dim": 0, "n_shared_experts": 0},
            "model.top_k = 2 belongs to a model with experts",
        ),
        (
            {"n_experts": 0, "moe_ffn_dim": 0, "n_shared_experts": 0, "top_k": 0, "balance": BALANCED},
            "moe.aux_loss_coefficient = 0.01 acts on experts, but this model has none",
        ),
    ],
)
def test_each_problem_is_named_alone(change: dict[str, object], words: str) -> None:
    args = replace(TINY_M, **change)  # type: ignore[arg-type]
    assert len(args.problems()) == 1
    with pytest.raises(ValueError, match=words):
        Decoder(args)
