"""One row of a side-by-side benchmark of trainers: `titan5d train` on the tokens and weights all trainers get.

    python integration_tests/bench/peers.py HARNESS LAYOUT PRECISION

One process per rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set). HARNESS is the folder of the harness, whose
common.py decides what is computed (shape S, tokens, initial weights, optimizer, steps) and records time, memory and
losses (Recorder). LAYOUT: one of LAYOUTS below, with moe_ in front for the harness's model with experts, and _compile
behind it. PRECISION: fp32, bf16. The whole of `train_step` is timed. CPU figures say nothing about GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

LAYOUTS = {
    "single": {},
    "ddp2": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1, "zero_stage": 0},
    "fsdp2": {"data_parallel_shard_degree": 2, "zero_stage": 3},
    "zero2": {"data_parallel_shard_degree": 2, "zero_stage": 2},
    "tp2": {"tensor_parallel_degree": 2},
    "cp2": {"context_parallel_degree": 2, "zero_stage": 3},
    "cp2_ag": {"context_parallel_degree": 2, "zero_stage": 3, "context_parallel_method": "allgather"},
    "pp2_1f1b": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    "pp2_gpipe": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe"},
    "pp2_zbv": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
    "ep2": {"data_parallel_shard_degree": 2, "zero_stage": 3, "expert_parallel_degree": 2},
}
DATA_RANKS = {"ddp2": 2, "fsdp2": 2, "zero2": 2, "ep2": 2}


def model_keys(common: Any) -> dict[str, object]:
    """The model of the harness, key by key."""
    shape = common.S
    sizes: dict[str, object] = {
        "model.dim": shape["dim"],
        "model.n_layers": shape["layers"],
        "model.n_heads": shape["heads"],
        "model.n_kv_heads": shape["kv"],
        "model.ffn_dim": shape["ffn"],
        "model.vocab_size": shape["vocab"],
        "model.rope_theta": common.THETA,
        "model.norm_eps": common.EPS,
    }
    if "experts" in shape:
        sizes |= {
            "model.name": "qwen3",
            "model.flavor": "debug_moe",
            "model.head_dim": shape["dim"] // shape["heads"],
            "model.tie_embeddings": False,
            "model.n_experts": shape["experts"],
            "model.top_k": shape["topk"],
            "model.moe_ffn_dim": shape["ffn"],
        }
    return sizes


def flags(
    common: Any, layout: str, precision: str, rows: Path, weights: Path, folder: Path
) -> dict[str, object]:
    """All keys of the run."""
    shape, cut = common.S, layout.removeprefix("moe_").removesuffix("_compile")
    return {
        **model_keys(common),
        "model.tokenizer_path": "bytes",
        "training.dataset": "tokens",
        "training.dataset_path": rows,
        "training.shuffle": False,
        "training.seq_len": shape["seq"],
        "training.local_batch_size": shape["batch"] // DATA_RANKS.get(cut, 1),
        "training.steps": common.STEPS,
        "training.max_norm": common.CLIP,
        "training.mixed_precision_param": {"fp32": "float32", "bf16": "bfloat16"}[precision],
        "training.device": "cpu",
        "optimizer.lr": common.OPT["lr"],
        "optimizer.beta1": common.OPT["betas"][0],
        "optimizer.beta2": common.OPT["betas"][1],
        "optimizer.eps": common.OPT["eps"],
        "optimizer.weight_decay": common.OPT["weight_decay"],
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0,
        "compile.enable": layout.endswith("_compile"),
        "checkpoint.initial_load_path": weights,
        "checkpoint.initial_load_in_hf": True,
        "job.dump_folder": folder / "run",
        "metrics.log_freq": common.STEPS,
        "metrics.peak_flops": "1e12",
        **{f"parallelism.{key}": value for key, value in LAYOUTS[cut].items()},
    }


def write_inputs(common: Any, folder: Path) -> None:
    """The tokens as rows, and the weights as a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file

    from titan5d.models.families import FAMILIES

    tokens = common.load_tokens()[: common.STEPS]  # (steps, batch, seq + 1)
    with (folder / "rows.jsonl").open("w") as out:
        for row in tokens.reshape(-1, tokens.shape[-1]):
            out.write(json.dumps({"tokens": row[:-1].tolist(), "labels": row[1:].tolist()}) + "\n")
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in common.init_sd().items():
        if ".mlp.experts." in name:  # (experts, out, in)
            for expert, part in enumerate(tensor):
                weights[name.replace("experts.", f"experts.{expert}.") + ".weight"] = part.contiguous()
        else:
            weights[name] = tensor.contiguous()
    (folder / "empty.toml").write_text("")
    (folder / "weights").mkdir()
    save_file(weights, folder / "weights" / "model.safetensors")
    keys = {key.removeprefix("model."): value for key, value in model_keys(common).items()}
    name, flavor = keys.pop("name", "llama3"), keys.pop("flavor", "debug")
    family = FAMILIES[name]
    config = family.to_hf_config(family.FLAVORS[flavor].with_overrides(**keys))
    (folder / "weights" / "config.json").write_text(json.dumps(config))


def main() -> int:
    harness, layout, precision = sys.argv[1:4]
    sys.path.insert(0, harness)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import common  # type: ignore[import-not-found]

    from titan5d.__main__ import main as titan5d
    from titan5d.train import optimizer, trainer

    recorder = common.Recorder("titan5d", layout, precision)
    train_step, steps = trainer.train_step, iter(range(1, common.STEPS + 1))

    def timed(*args: Any, **kwargs: Any) -> Any:
        recorder.start()
        result = train_step(*args, **kwargs)
        recorder.stop()
        _keep(recorder, next(steps), result)
        return result

    trainer.train_step = timed
    optimizer.is_decayed = lambda name, parameter: True  # the harness decays norms too
    # One folder for all ranks: they must agree on every path. Each writes the same files into it, whole.
    run = Path(common.BASE) / "out" / f"titan5d_{layout}_{precision}_{os.environ.get('MASTER_PORT', '0')}"
    (run / "weights").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run) as name:
        write_inputs(common, Path(name))
        for file in [path for path in Path(name).rglob("*") if path.is_file()]:
            file.replace(run / file.relative_to(name))
    options = flags(common, layout, precision, run / "rows.jsonl", run / "weights", run)
    words = [f"--{key}={_text(value)}" for key, value in options.items()]
    status = titan5d(["train", "--config", str(run / "empty.toml"), *words])
    recorder.finish()
    return status


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keep(recorder: Any, step: int, result: Any) -> None:
    recorder.loss[step], recorder.grad_norm[step] = result.loss, result.grad_norm


if __name__ == "__main__":
    sys.exit(main())
