"""Hugging Face's format: opens in transformers with equal logits, comes back bitwise, never holds the whole model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.checkpoint.runs import metrics, run, tensors
from titan5d.__main__ import main
from titan5d.checkpoint.manifest import Manifest, read_manifest, write_manifest
from titan5d.checkpoint.save import write_share
from titan5d.checkpoint.source import CheckpointSource, read_whole
from titan5d.checkpoint.state import model_blocks
from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.models.rope_scaling import Llama3Scaling, YarnScaling

TINY = ModelArgs(dim=64, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=96, vocab_size=300, max_seq_len=128)
MOE = replace(TINY, n_experts=4, top_k=2, moe_ffn_dim=48)
MODELS: dict[str, tuple[str, ModelArgs]] = {
    "llama3": ("llama3", TINY),
    "one KV head, wide heads, biases": (
        "llama3",
        replace(TINY, n_kv_heads=1, head_dim=16, attention_bias=True),
    ),
    "tied, scaled": (
        "llama3",
        replace(TINY, tie_embeddings=True, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
    ),
    "qwen3": ("qwen3", replace(TINY, qk_norm=True, head_dim=16, norm_eps=1e-6)),
    "qwen3 experts": ("qwen3", replace(MOE, qk_norm=True, norm_eps=1e-6, router_normalize=False)),
    "mixtral": ("mixtral", replace(MOE, ffn_dim=48)),
    "deepseek_v3": (
        "deepseek_v3",
        replace(
            MOE,
            n_kv_heads=8,
            head_dim=0,
            n_experts=8,
            n_shared_experts=1,
            n_dense_layers=1,
            router_score="sigmoid",
            router_scale=2.5,
            n_expert_groups=4,
            n_limited_groups=2,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            rope_scaling=YarnScaling(4.0, 64),
        ),
    ),
}


def random_model(args: ModelArgs) -> Decoder:
    torch.manual_seed(3)
    model = Decoder(args)
    model.init_buffers("cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias") and args.router_score == "sigmoid":
                buffer.normal_(std=0.1)
    return model.eval()


def save(folder: Path, family: str, model: Decoder) -> dict[str, torch.Tensor]:
    """A checkpoint of ours with the weights of `model`, and these weights."""
    folder.mkdir(parents=True)
    blocks = {block.key: block for block in model_blocks(model)}
    written = write_share(folder, 0, blocks, None, {})
    description = {"name": family, "args": asdict(model.args)}
    write_manifest(
        folder, Manifest(1, "weights", model=description, tensors=written.tensors, files=written.files)
    )
    return {key: block.local for key, block in blocks.items()}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    """Cases 060 and 063 on whole folders: equal logits in transformers, and every tensor comes back bitwise."""
    family, args = MODELS[name]
    model = random_model(args)
    weights = save(tmp_path / "ours", family, model)
    there, back = tmp_path / "hf", tmp_path / "back"
    words = [
        "convert",
        "to-hf",
        str(tmp_path / "ours"),
        str(there),
        "--tokenizer",
        "bytes",
        "--file-gb",
        "1e-4",
    ]
    assert main(words) == 0
    files = sorted(there.glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    stored = [tensor for file in files for tensor in load_file(file).items()]
    assert len(stored) == len(dict(stored)) and ("lm_head.weight" in dict(stored)) == (
        not args.tie_embeddings
    )
    config = json.loads((there / "config.json").read_text())
    assert config["eos_token_id"] == 257 and config["torch_dtype"] == "float32"

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        there, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    tokens = torch.randint(300, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = theirs.eval()(tokens).logits, model(tokens)
    assert (logits - expected).abs().max() <= 1e-5 and logits.std() > 0.01
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))

    assert main(["convert", "from-hf", str(there), str(back)]) == 0
    manifest = read_manifest(back)
    source = CheckpointSource(back, manifest)
    found = {key: read_whole(source, key) for key in source.specs()}
    lost = weights.keys() - found.keys()
    assert found.keys() <= weights.keys() and all(
        key.endswith((".router.load", ".router.bias")) for key in lost
    )
    for key, tensor in found.items():
        assert torch.equal(tensor, weights[key]) and tensor.dtype == weights[key].dtype, key
    assert main(["checkpoint", "verify", str(back)]) == 0


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    save(tmp_path / "ours", "llama3", random_model(replace(TINY, vocab_size=4096)))
    text = "Größe, naïve – tokens\n\tand 日本 \x00\x7f!"
    from titan5d.data.tokenizer import load_tokenizer

    for name in ("bytes", "bpe4k"):
        words = ["convert", "to-hf", str(tmp_path / "ours"), str(tmp_path / name), "--tokenizer", name]
        assert main(words) == 0
        theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / name), load_tokenizer(name)
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
        assert theirs.eos_token_id == ours.eos_id


def test_types_are_converted(tmp_path: Path) -> None:
    weights = save(tmp_path / "ours", "llama3", random_model(TINY))
    assert (
        main(["convert", "to-hf", str(tmp_path / "ours"), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    )
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    stored = load_file(file)
    assert torch.equal(stored["model.norm.weight"], weights["model.norm.weight"].bfloat16())
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


RUN: dict[str, Any] = {
    "model__n_layers": 2,
    "model__dim": 64,
    "checkpoint__interval": 10,
    "checkpoint__last_save_model_only": "true",
    "checkpoint__last_save_in_hf": "true",
    "training__steps": 2,
}


def test_a_run_ends_in_the_format_and_another_starts_from_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cut = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "1F1B"}
    ranks = 2
    assert run(tmp_path, "hf", ranks, **RUN, **cut) == [0] * ranks
    assert (
        run(tmp_path, "ours", ranks, **{**RUN, "checkpoint__last_save_in_hf": "false"}, **cut) == [0] * ranks
    )
    folder = tmp_path / "hf" / "checkpoint" / "step-2"
    assert not list(folder.glob("rank-*")) and read_manifest(folder).kind == "hugging_face"
    weights = tensors(tmp_path, "ours", 2)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert torch.equal(theirs.lm_head.weight, weights["model.output.weight"])
    assert run(tmp_path, "hf", ranks, **RUN, **cut) == [0] * ranks  # finished
    given = {"checkpoint__initial_load_path": folder, "checkpoint__initial_load_in_hf": "true"}
    more = {**RUN, "checkpoint__last_save_in_hf": "false", "optimizer__lr": 0}
    assert run(tmp_path, "again", 2, **more, **given, parallelism__tensor_parallel_degree=2) == [0, 0]
    assert "(Hugging Face's format)" in capfd.readouterr().err
    for key, tensor in tensors(tmp_path, "again", 2).items():
        assert torch.equal(tensor, weights[key]), key
    assert run(tmp_path, "other", 1, **{**more, "model__ffn_dim": 96}, **given) == [2]
    assert "has ffn_dim = 128, this run 96" in capfd.readouterr().err
    assert not (tmp_path / "other" / "metrics.jsonl").exists() or not metrics(tmp_path, "other")


def test_pickles_and_incomplete_folders_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "ours", "llama3", random_model(TINY))
    hf = tmp_path / "hf"
    assert main(["convert", "to-hf", str(tmp_path / "ours"), str(hf), "--file-gb", "1e-4"]) == 0
    assert main(["convert", "to-hf", str(tmp_path / "ours"), str(hf)]) == 2
    assert "not empty" in capsys.readouterr().err
    for damage, said in (
        (lambda: sorted(hf.glob("*.safetensors"))[1].unlink(), "which its index names"),
        (lambda: (hf / "model.safetensors.index.json").unlink(), "has no lm_head.weight"),
        (lambda: [file.rename(file.with_suffix(".bin")) for file in hf.glob("*.safetensors")], "pickles"),
        (lambda: (hf / "config.json").write_text('{"model_type": "gpt2"}'), "'gpt2'"),
        (lambda: (hf / "config.json").unlink(), "config.json"),
    ):
        damage()
        assert main(["convert", "from-hf", str(hf), str(tmp_path / "back")]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "back").exists()
