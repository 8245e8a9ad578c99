"""Frequencies against published numbers and against transformers."""

from __future__ import annotations

import pytest
import torch

from titan5d.models.rope_scaling import Llama3Scaling, YarnScaling, plain_frequencies, yarn_mscale

transformers_rope = pytest.importorskip("transformers.modeling_rope_utils")
LlamaConfig = pytest.importorskip("transformers").LlamaConfig


def theirs(head_dim: int, theta: float, rope: dict[str, object]) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=1_000_000,
        rope_parameters={"rope_theta": theta, **rope},
    )
    return transformers_rope.ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=torch.device("cpu"))


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_equals_transformers(factor: float, head_dim: int) -> None:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    expected, _ = theirs(head_dim, 500_000.0, rope | {"original_max_position_embeddings": 8192})
    ours = Llama3Scaling(factor, 1.0, 4.0, 8192).frequencies(head_dim, 500_000.0)
    torch.testing.assert_close(torch.tensor(ours), expected, rtol=1e-6, atol=0)
    assert ours != plain_frequencies(head_dim, 500_000.0)


@pytest.mark.parametrize(("theta", "original", "factor"), [(10_000.0, 4096, 40.0), (500_000.0, 8192, 4.0)])
def test_yarn_equals_transformers(theta: float, original: int, factor: float) -> None:
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    expected, attention_factor = theirs(64, theta, rope)
    ours = YarnScaling(factor, original)
    torch.testing.assert_close(torch.tensor(ours.frequencies(64, theta)), expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_yarn_published_numbers() -> None:
    """Case 030: the policy decides, no sequence length is ever asked for."""
    small = YarnScaling(factor=4.0, original_max_seq_len=64, beta_fast=32.0, beta_slow=1.0)
    expected = [1, 0.237170825, 0.05, 0.00790569415, 0.0025, 0.000790569415, 0.00025, 7.90569415e-05]
    assert small.frequencies(16, 10_000.0) == pytest.approx(expected, rel=1e-8)
    assert small.softmax_multiplier == pytest.approx(1.2964770, rel=1e-7)
    large = YarnScaling(factor=40.0, original_max_seq_len=4096, attention_factor=yarn_mscale(40.0, 1.0))
    assert large.softmax_multiplier == pytest.approx(1.873854, rel=1e-6)
    assert 192**-0.5 * large.softmax_multiplier == pytest.approx(0.135233779, rel=1e-8)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        (Llama3Scaling(0.5, 1.0, 4.0, 8192), "factor = 0.5"),
        (Llama3Scaling(8.0, 4.0, 1.0, 8192), "low_freq_factor = 4.0 and high_freq_factor = 1.0"),
        (YarnScaling(4.0, 0), "original_max_seq_len = 0"),
        (YarnScaling(4.0, 64, beta_fast=1.0, beta_slow=32.0), "beta_slow = 32.0 and beta_fast = 1.0"),
        (YarnScaling(4.0, 64, attention_factor=-1.0), "attention_factor = -1.0"),
    ],
)
def test_impossible_rules_are_named(scaling: Llama3Scaling | YarnScaling, words: str) -> None:
    assert any(words in problem for problem in scaling.problems())


def test_published_rules_have_no_problems() -> None:
    assert Llama3Scaling(8.0, 1.0, 4.0, 8192).problems() == []
    assert YarnScaling(40.0, 4096).problems() == []
