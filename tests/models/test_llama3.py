"""Published sizes; equality with transformers' LlamaForCausalLM; config fields both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from titan5d.models.args import ModelArgs, count_parameters
from titan5d.models.decoder import Decoder
from titan5d.models.llama3 import FLAVORS, from_hf_config, hf_name_map, titan_name_map, to_hf_config
from titan5d.models.rope_scaling import Llama3Scaling, YarnScaling

transformers = pytest.importorskip("transformers")

TINY = ModelArgs(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=256)
VARIANTS = {
    "GQA 8/2": replace(TINY, n_kv_heads=2),
    "GQA 8/1": replace(TINY, n_kv_heads=1),
    "no GQA": replace(TINY, n_kv_heads=8),
    "head_dim 16": replace(TINY, head_dim=16),
    "tied": replace(TINY, tie_embeddings=True),
    "biases": replace(TINY, attention_bias=True),
    "llama3 rope": replace(
        TINY, rope_theta=5e5, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 32), max_seq_len=256
    ),
    "yarn rope": replace(TINY, rope_scaling=YarnScaling(4.0, 16), max_seq_len=64),
}

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [
        ("debug", 6_819_072),
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_published_parameter_counts(flavor: str, parameters: int) -> None:
    assert count_parameters(FLAVORS[flavor]).total == parameters


def theirs(args: ModelArgs, family: str = "Llama", **more: Any) -> Any:
    fields = to_hf_config(replace(args, qk_norm=False)) | more
    fields = {key: value for key, value in fields.items() if key not in ("architectures", "model_type")}
    config = getattr(transformers, f"{family}Config")(**fields, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # norms and biases too, so that none can be missed
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


def ours(args: ModelArgs, hf_model: Any) -> Decoder:
    names, model = titan_name_map(args), Decoder(args)
    weights = {names[name]: value.detach() for name, value in hf_model.named_parameters()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert unexpected == [] and missing == (["output.weight"] if args.tie_embeddings else [])
    return model


def assert_equal(args: ModelArgs, model: Decoder, hf_model: Any) -> None:
    """Logits within 1e-5, and every gradient of a cross-entropy within 1e-5 of its largest element."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(256, (2, 64), generator=generator) for _ in range(2))
    expected = hf_model(tokens).logits
    logits = model(tokens)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    model(tokens, labels=labels)[0].backward()
    names = titan_name_map(args)
    compared = 0
    for name, parameter in hf_model.named_parameters():
        gradient = model.get_parameter(names[name]).grad
        assert gradient is not None and parameter.grad.abs().max() > 0, name
        assert (gradient - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max(), name
        compared += 1
    assert compared == len(list(model.parameters()))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_equal_transformers(name: str) -> None:
    args = VARIANTS[name]
    hf_model = theirs(args)
    assert_equal(args, ours(args, hf_model), hf_model)


def test_qk_norm_equals_qwen3() -> None:
    args = replace(TINY, qk_norm=True)
    hf_model = theirs(args, "Qwen3", use_sliding_window=False)
    assert_equal(args, ours(args, hf_model), hf_model)


def test_greedy_continuation_equals_transformers() -> None:
    args = VARIANTS["GQA 8/2"]
    hf_model = theirs(args)
    model, row = ours(args, hf_model), torch.arange(8)[None]
    expected = hf_model.generate(
        row, attention_mask=torch.ones_like(row), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    with torch.no_grad():
        for _ in range(20):
            row = torch.cat((row, model(row)[:, -1:].argmax(-1)), dim=1)
    assert row.tolist() == expected.tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_names_are_one_to_one_and_complete(name: str) -> None:
    args = VARIANTS[name]
    names = hf_name_map(args)
    assert set(names) == {name for name, _ in Decoder(args).named_parameters()}
    assert {theirs: ours for ours, theirs in names.items()} == titan_name_map(args)
    assert len(titan_name_map(args)) == len(names)


@pytest.mark.parametrize("name", [*VARIANTS, *FLAVORS])
def test_config_there_and_back(name: str) -> None:
    args = (VARIANTS | FLAVORS)[name]
    emitted = to_hf_config(args)
    assert from_hf_config(emitted) == args
    # what transformers makes of it and writes itself (rope_parameters instead of rope_theta and rope_scaling)
    written = transformers.LlamaConfig(**emitted).to_dict()
    assert "rope_scaling" not in written and from_hf_config(written) == args


def test_absent_fields_take_hugging_faces_defaults() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    args = from_hf_config(sizes | {"vocab_size": 256})
    written = transformers.LlamaConfig(**sizes, vocab_size=256).to_dict()
    assert args == from_hf_config(written)
    assert args.n_kv_heads == 8 and args.norm_eps == 1e-6 and args.head_dim == 8


def test_yarn_mscale_fields_are_read_as_transformers_reads_them() -> None:
    rope = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}
    parameters = rope | {"rope_theta": 10_000.0}
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=8, rope_parameters=parameters)
    _, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    scaling = from_hf_config(to_hf_config(TINY) | {"rope_scaling": rope}).rope_scaling
    assert scaling is not None and scaling.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mistral"}, "model_type = 'mistral', but only 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "needs original_max_position_embeddings, low",
        ),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate = False"),
        ({"num_key_value_heads": 3}, "n_kv_heads = 3 does not divide"),
    ],
)
def test_foreign_configs_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_hf_config(to_hf_config(TINY) | change)


def test_missing_sizes_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"hidden_size is missing\n.*num_hidden_layers is missing"):
        from_hf_config({"intermediate_size": 128, "num_attention_heads": 8, "vocab_size": 256})


def test_qk_norm_has_no_llama_config() -> None:
    with pytest.raises(ValueError, match="qk_norm"):
        to_hf_config(replace(TINY, qk_norm=True))
