"""FLOP counts against the papers' figures, brute force over masks, and what torch counts in a real step."""

import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from titan5d.metrics.flops import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    FlopShape,
    MlaShape,
    MoeShape,
    Recompute,
    Work,
    flop_shape,
    flops_per_token,
    training_flops,
    work_of,
)

LLAMA_8B = FlopShape(4096, 32, 32, 8, 128, 14336, 128256)
LLAMA_70B = FlopShape(8192, 80, 64, 8, 128, 28672, 128256)
LLAMA_405B = FlopShape(16384, 126, 128, 8, 128, 53248, 128256)
MIXTRAL_8X7B = FlopShape(4096, 32, 32, 8, 128, 14336, 32000, moe=MoeShape(8, 2, 14336))
DEEPSEEK_V3 = FlopShape(
    dim=7168,
    n_layers=61,
    n_heads=128,
    n_kv_heads=128,
    head_dim=128,
    ffn_dim=18432,
    vocab_size=129280,
    moe=MoeShape(n_experts=256, top_k=8, expert_dim=2048, shared_dim=2048, n_dense_layers=3),
    mla=MlaShape(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
)
TINY_D = FlopShape(dim=64, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=8, ffn_dim=128, vocab_size=256)
TINY_M = replace(TINY_D, moe=MoeShape(n_experts=8, top_k=2, expert_dim=64, shared_dim=64))


@pytest.mark.parametrize(
    ("shape", "seq_len", "causal", "full"),
    [
        (LLAMA_8B, 8192, "51.47", "57.91"),
        (LLAMA_70B, 8192, "449.22", "481.43"),
        (LLAMA_405B, 8192, "2523.96", "2625.42"),
        (LLAMA_405B, 131072, "4045.99", "5669.48"),
        (MIXTRAL_8X7B, 4096, "79.71", "82.93"),
        (DEEPSEEK_V3, 4096, "250.45", "281.15"),
    ],
    ids=["llama-8b", "llama-70b", "llama-405b", "llama-405b-128k", "mixtral-8x7b", "deepseek-v3"],
)
def test_published_models(shape, seq_len, causal, full):
    assert f"{flops_per_token(shape, seq_len) / 1e9:.2f}" == causal
    assert f"{flops_per_token(shape, seq_len, 'full') / 1e9:.2f}" == full


def test_reported_throughputs_agree():
    """TFLOP/s over tokens/s of published runs: 405B 822/326, 70B 728/1621."""
    assert flops_per_token(LLAMA_405B, 8192) == pytest.approx(822e12 / 326, rel=2e-3)
    assert flops_per_token(LLAMA_70B, 8192) == pytest.approx(728e12 / 1621, rel=1e-3)


def test_case_077_dense_gqa():
    assert flops_per_token(TINY_D, 64, "full") == pytest.approx(1_183_104, rel=0.01)
    assert flops_per_token(TINY_D, 64) == pytest.approx(1_084_800, rel=0.01)
    # the report's figure has 6 FLOPs for each of the 9 norms of 64 weights; nothing else differs
    assert flops_per_token(TINY_D, 64, "full") == 1_183_104 - 6 * 9 * 64
    # a window of 16: min(window, seq_len) in the full convention
    window = replace(TINY_D, sliding_window=16)
    saved = flops_per_token(TINY_D, 64, "full") - flops_per_token(window, 64, "full")
    assert saved == 12 * 4 * 64 * (64 - 16)
    assert flops_per_token(window, 16, "full") == flops_per_token(TINY_D, 16, "full")


def test_case_078_only_active_experts_count():
    assert flops_per_token(TINY_M, 64, "full") == pytest.approx(1_490_304, rel=0.01)
    assert flops_per_token(TINY_M, 64, "full") == 1_490_304 - 6 * 9 * 64
    all_experts = replace(TINY_M, moe=replace(TINY_M.moe, top_k=8))
    assert flops_per_token(all_experts, 64, "full") == pytest.approx(3_259_776, rel=0.01)


def causal_pairs(length, window=None):
    """(query, key) pairs a mask lets through, one by one; the triangle counts half its diagonal."""
    window = min(window or length, length)
    return sum(min(query + 1, window) for query in range(length)) - window / 2


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("lengths", [[64], [5, 11, 48], [1] * 7, [16, 17, 15]])
def test_attention_counts_the_pairs_inside_the_mask(lengths, window):
    flops = training_flops(replace(TINY_D, sliding_window=window))
    attention = flops.model_flops(work_of(lengths, window)) - flops.linear * sum(lengths)
    per_pair = 12 * 4 * 8 * 8  # 12 FLOPs x layers x heads x head_dim
    pairs = sum(causal_pairs(length, window) for length in lengths)
    assert attention == pytest.approx(per_pair * pairs, rel=1e-12)


def test_step_is_linear_plus_quadratic():
    flops = training_flops(TINY_M)
    lengths = [5, 11, 48, 64, 64]
    work = work_of(lengths)
    assert (work.tokens, work.squares) == (192, 5**2 + 11**2 + 48**2 + 2 * 64**2)
    assert flops.model_flops(work) == flops.linear * 192 + flops.quadratic * work.squares
    assert flops.model_flops(work_of([64])) == 64 * flops.per_token(64)
    assert work_of([5, 11]) + work_of([48, 64, 64]) == work


def test_layers_with_and_without_a_window():
    """One layer in four with full attention, as in Gemma 3 and Llama 4."""
    mixed = training_flops(replace(TINY_D, sliding_window=16, n_window_layers=3))
    window = training_flops(replace(TINY_D, sliding_window=16))
    full = training_flops(TINY_D)
    work = work_of([64], window=16)
    assert mixed.model_flops(work) == pytest.approx(
        0.75 * window.model_flops(work) + 0.25 * full.model_flops(work), rel=1e-12
    )


def test_work_summed_without_the_window_is_refused():
    flops = training_flops(replace(TINY_D, sliding_window=16))
    with pytest.raises(ValueError, match=r"sliding window of 16, .* 64 tokens .* pass window=16 to work_of"):
        flops.model_flops(work_of([64]))


def test_full_recompute_is_narayanans_count():
    """96 B s L h^2 (1 + s/6h + V/16Lh) of arXiv:2104.04473: h = heads x head_dim, MLP two h x 4h."""
    h, n_layers, vocab, seq, batch = 1024, 24, 51200, 2048, 3
    # three SwiGLU matrices of h x (8/3)h are two of h x 4h
    shape = FlopShape(h, n_layers, 16, 16, 64, 8 * h // 3, vocab)
    flops = training_flops(shape)
    work = Work(batch * seq, squares=2 * batch * seq**2)  # twice: the paper charges the full square
    paper = 96 * batch * seq * n_layers * h**2 * (1 + seq / (6 * h) + vocab / (16 * n_layers * h))
    assert flops.hardware_flops(work, FULL_RECOMPUTE) == pytest.approx(paper, rel=1e-3)  # 8h/3 is rounded
    assert flops.hardware_flops(work, NO_RECOMPUTE) == flops.model_flops(work)
    half = flops.hardware_flops(work, Recompute(0.5, 0.5))
    assert half == pytest.approx((flops.model_flops(work) + flops.hardware_flops(work, FULL_RECOMPUTE)) / 2)


def test_attention_only_recompute_runs_one_more_forward_of_it():
    flops = training_flops(LLAMA_8B)
    work = work_of([8192])
    extra = flops.hardware_flops(work, Recompute(matmuls=0.0, attention=1.0)) - flops.model_flops(work)
    # QK^T and PV, 2 FLOPs each, over half the pairs
    assert extra == 32 * (2 + 2) * 32 * 128 * 8192**2 / 2


def test_multi_token_prediction_adds_a_layer_a_joint_and_a_head():
    """DeepSeek-V3 with its one MTP module, by plain numbers."""
    base, mtp = (training_flops(replace(DEEPSEEK_V3, n_mtp=n)) for n in (0, 1))
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 3 * 7168 * 2048 * (8 + 1) + 7168 * 256
    assert mtp.block_params - base.block_params == attention + experts + 2 * 7168 * 7168
    assert mtp.head_params == 2 * base.head_params
    assert mtp.pair_flops == base.pair_flops * 62 // 61


def test_mla_without_query_compression():
    """DeepSeek-V2-Lite projects queries straight from the hidden state."""
    shape = replace(DEEPSEEK_V3, mla=replace(DEEPSEEK_V3.mla, q_rank=0))
    low_rank = 7168 * 1536 + 1536 * 128 * 192
    gained = training_flops(shape).block_params - training_flops(DEEPSEEK_V3).block_params
    assert gained == 61 * (7168 * 128 * 192 - low_rank)


@dataclass(frozen=True)
class DenseArgs:
    dim: int = 64
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 8
    ffn_dim: int = 128
    vocab_size: int = 256
    tie_embeddings: bool = False


def test_shape_from_model_arguments():
    assert flop_shape(DenseArgs()) == TINY_D
    assert flop_shape(DenseArgs(tie_embeddings=True)) == TINY_D  # a tied head is still a product
    dense = {name: getattr(TINY_D, name) for name in DenseArgs.__dataclass_fields__ if hasattr(TINY_D, name)}
    moe = SimpleNamespace(**dense, n_experts=8, top_k=2, moe_ffn_dim=64, n_shared_experts=1)
    assert flop_shape(moe) == TINY_M
    moe.n_shared_experts, moe.shared_ffn_dim, moe.n_dense_layers = 0, 64, 1
    assert flop_shape(moe) == replace(TINY_M, moe=replace(TINY_M.moe, n_dense_layers=1))
    mla = SimpleNamespace(
        **dense, kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )
    assert flop_shape(mla).mla == MlaShape(q_rank=0, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8)


def test_missing_size_is_named():
    with pytest.raises(AttributeError, match="cannot count FLOPs: SimpleNamespace has no top_k"):
        flop_shape(SimpleNamespace(n_experts=8, moe_ffn_dim=64))
    with pytest.raises(AttributeError, match="has no dim"):
        flop_shape(SimpleNamespace())


def test_planner_can_count_without_torch():
    code = "import sys, titan5d.hardware, titan5d.metrics.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("n_kv_heads", [8, 2, 1])
@pytest.mark.parametrize("recompute", [NO_RECOMPUTE, FULL_RECOMPUTE], ids=["stored", "recomputed"])
def test_equals_what_torch_counts_in_a_step_of_a_peer_model(n_kv_heads, recompute):
    """A Hugging Face Llama with attention as plain matmuls, counted op by op through forward and backward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    batch, seq = 2, 48
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=n_kv_heads,
            head_dim=8,
            intermediate_size=96,
            vocab_size=256,
            attn_implementation="eager",
            use_cache=False,
        )
    )
    if recompute is FULL_RECOMPUTE:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
        model(input_ids=tokens, labels=tokens).loss.backward()

    shape = FlopShape(64, 3, 8, n_kv_heads, 8, 96, 256)
    work = Work(batch * seq, squares=2 * batch * seq**2)  # twice: eager attention computes the whole square
    rotary = counter.get_total_flops() - training_flops(shape).hardware_flops(work, recompute)
    # the peer makes its rotary angles with a matmul, (head_dim / 2, 1) x (1, S)
    assert rotary == 2 * (8 // 2) * seq
