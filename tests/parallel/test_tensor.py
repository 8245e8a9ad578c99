"""Cut 2 against one process: degrees, sequence parallelism, ZeRO stages, few KV heads, odd vocabularies, recompute."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch._dynamo  # the first custom operator imports it: once here instead of on each forked rank

from tests.parity import (
    TINY,
    TINY_TIED,
    UNEQUAL,
    Case,
    assert_parity,
    close,
    global_batch,
    layout,
    reference,
)
from titan5d.models.args import ModelArgs
from titan5d.parallel.tensor import TensorParallel
from titan5d.topology import Topology

TWO_LAYERS = replace(TINY, n_layers=2)
TWO_KV_HEADS = replace(TINY, n_kv_heads=2)
EVERYTHING = replace(TWO_KV_HEADS, qk_norm=True, attention_bias=True, n_layers=2)
"""Norms of heads, biases, and more ranks than key/value heads from tp 4 on."""
LATENT = ModelArgs(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    ffn_dim=128,
    vocab_size=256,
    kv_lora_rank=32,
    q_lora_rank=48,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
SP, NO_SP = TensorParallel(), TensorParallel(sequence_parallel=False)


def vocabulary(size: int) -> ModelArgs:
    return replace(TWO_LAYERS, vocab_size=size)


@pytest.mark.parametrize(
    ("tp", "tensor", "accumulation"), [(2, SP, 4), (2, NO_SP, 1), (4, SP, 1), (4, NO_SP, 2)]
)
def test_degrees(tp: int, tensor: TensorParallel, accumulation: int) -> None:
    assert_parity(
        Case(Topology(tp=tp), tensor=tensor, accumulation=accumulation, documents=True, steps=2, lr=0.1)
    )


@pytest.mark.parametrize("args", [TINY, TWO_KV_HEADS], ids=["kv4", "kv2"])
def test_eight_ranks_share_fewer_kv_heads(args: ModelArgs) -> None:
    tensor = SP if args is TWO_KV_HEADS else NO_SP
    assert_parity(Case(Topology(tp=8), args=replace(args, n_layers=2), tensor=tensor))


@pytest.mark.parametrize("tensor", [SP, NO_SP], ids=["sp", "no_sp"])
def test_head_norms_biases_and_few_kv_heads(tensor: TensorParallel) -> None:
    assert_parity(Case(Topology(tp=4), args=EVERYTHING, tensor=tensor, accumulation=2))


@pytest.mark.parametrize(
    ("args", "tensor"), [(LATENT, SP), (replace(LATENT, q_lora_rank=0), NO_SP)], ids=["sp", "no_sp"]
)
def test_latent_attention(args: ModelArgs, tensor: TensorParallel) -> None:
    assert_parity(Case(Topology(tp=2), args=args, tensor=tensor))


@pytest.mark.parametrize(
    ("topology", "stage", "tensor"),
    [
        (Topology(dp_shard=2, tp=2), 3, SP),
        (Topology(dp_shard=2, tp=2), 2, TensorParallel(loss_parallel=False)),
        (Topology(dp_shard=2, tp=2), 1, SP),
        (Topology(dp_replicate=2, tp=2), 0, SP),
    ],
    ids=str,
)
def test_with_data_parallelism(topology: Topology, stage: int, tensor: TensorParallel) -> None:
    case = Case(topology, stage, accumulation=2, tensor=tensor, args=vocabulary(257), max_norm=0.1, steps=2)
    assert_parity(case)


@pytest.mark.parametrize(
    "tensor",
    [TensorParallel(regather_input=False), TensorParallel(loss_parallel=False, sequence_parallel=False)],
    ids=["keep_input", "gather_logits_no_sp"],
)
def test_ways_to_do_the_same(tensor: TensorParallel) -> None:
    assert_parity(Case(Topology(tp=2), args=vocabulary(255), tensor=tensor))


@pytest.mark.parametrize(("tp", "size"), [(4, 250), (4, 257), (2, 259)])
def test_uneven_vocabulary(tp: int, size: int) -> None:
    assert_parity(Case(Topology(tp=tp), args=vocabulary(size)))


def test_tied_embedding_and_head_stay_one_tensor() -> None:
    args = replace(TINY_TIED, n_layers=2, vocab_size=250)
    assert_parity(Case(Topology(dp_shard=2, tp=2), args=args, accumulation=2, steps=2))
    assert_parity(Case(Topology(tp=4), args=args, tensor=NO_SP, steps=2))


@pytest.mark.parametrize(("seq_len", "rows"), [(4, UNEQUAL), (512, (512, 300))], ids=["one_token", "long"])
def test_short_and_long_sequences(seq_len: int, rows: tuple[int, ...]) -> None:
    assert_parity(Case(Topology(tp=4), args=TWO_LAYERS, seq_len=seq_len, valid=rows))


def test_a_sequence_that_does_not_divide_without_sequence_parallelism() -> None:
    assert_parity(Case(Topology(tp=4), args=TWO_LAYERS, seq_len=30, tensor=NO_SP))


@pytest.mark.parametrize("tensor", [SP, NO_SP], ids=["sp", "no_sp"])
def test_replicated_gradients_are_counted_once(tensor: TensorParallel) -> None:
    """Case 011. With small norm weights the gradient is theirs; counted on all 4 ranks it is twice as long."""
    expected = reference(Case(args=TWO_LAYERS, norm_scale=0.001))
    parts = expected.gradients.items()
    replicated = sum(float(grad.square().sum()) for name, grad in parts if "norm" in name)
    assert replicated > 0.99 * expected.norms[0] ** 2
    assert_parity(Case(Topology(tp=4), args=TWO_LAYERS, norm_scale=0.001, tensor=tensor))


def test_norm_with_large_norm_weights() -> None:
    """Case 011."""
    case = Case(Topology(tp=4), args=TWO_LAYERS, norm_scale=50.0)
    for found in layout(case):
        close(found.norms, reference(case).norms, 1e-5, "norm")


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute(recompute: str) -> None:
    keep = TensorParallel(regather_input=recompute == "selective")
    assert_parity(Case(Topology(tp=2), args=TWO_LAYERS, recompute=recompute, tensor=keep, accumulation=2))


def test_logged_loss_with_context_parallelism() -> None:
    """Case 007."""
    assert_parity(Case(Topology(tp=2, cp=2), args=TWO_LAYERS, documents=True))


def test_bf16() -> None:
    # the order of sums differs, so equality is to bf16's rounding: 2^-8 of the largest element, a few times over
    case = Case(Topology(dp_shard=2, tp=2), args=TWO_LAYERS, dtype=torch.bfloat16)
    assert_parity(case, loss=1e-3, gradient=4e-2)


@pytest.mark.parametrize("tp", [2, 4])
def test_twenty_steps_with_an_odd_vocabulary(tp: int) -> None:
    """Case 021."""
    case = Case(Topology(tp=tp), args=vocabulary(257), steps=20)
    assert any((global_batch(case, step)[1] == 256).any() for step in range(20))  # the last row is a target
    expected = reference(case)
    for found in layout(case):
        close(found.losses, expected.losses, 1e-5, "loss")
        assert found.weights["output.weight"].shape == (257, TINY.dim)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tensor", [SP, NO_SP], ids=["sp", "no_sp"])
def test_stages_by_accumulation(tensor: TensorParallel, stage: int, accumulation: int) -> None:
    data = {"dp_replicate": 2} if stage == 0 else {"dp_shard": 2}
    assert_parity(
        Case(Topology(tp=2, **data), stage, accumulation, args=EVERYTHING, tensor=tensor, steps=2, lr=0.1)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "tensor"),
    [
        (shape, tensor)
        for shape, tensor in product(
            [
                Topology(dp_replicate=2, dp_shard=2, tp=2),
                Topology(dp_shard=2, tp=4),
                Topology(dp_shard=2, cp=2, tp=2),
                Topology(pp=2, tp=2),
                Topology(pp=2, dp_shard=2, tp=2),
            ],
            [SP, NO_SP],
        )
    ],
    ids=str,
)
def test_larger_layouts(topology: Topology, tensor: TensorParallel) -> None:
    args = replace(TINY, vocab_size=250)
    assert_parity(Case(topology, args=args, tensor=tensor, accumulation=2, documents=True), timeout=110)
