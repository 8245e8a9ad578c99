"""`titan5d train` on one process against a bare loop: the same model, optimizer and shapes, data already in memory.

    python integration_tests/bench/single_process.py [--rounds 3] [--steps 20]

Prints tokens/s, CPU seconds a step and peak memory of both, and their ratios, in fp32 and bf16. Rounds alternate
between the two, so a slow moment of the machine meets both. Figures are the lower quartile over all steps of all
rounds: other work on the machine only ever adds time.
What is asked for: tokens/s >= 0.97 of the bare loop, peak memory <= 1.05. CPU figures say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

SEQ, ROWS, WARMUP = 512, 4, 5
SIZES = {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 768, "vocab_size": 2048}


def bare_loop(precision: str, steps: int) -> dict:
    """What a person writes by hand: forward, cross-entropy, backward, clip, AdamW."""
    import torch
    import torch.nn.functional as F

    from titan5d.models.args import ModelArgs
    from titan5d.models.decoder import Decoder

    torch.manual_seed(0)
    model = Decoder(ModelArgs(**SIZES))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = torch.randint(SIZES["vocab_size"], (steps, ROWS, SEQ + 1))
    autocast = contextlib.nullcontext()
    if precision == "bfloat16":
        autocast = torch.autocast("cpu", torch.bfloat16)
    wall, cpu = [], []
    for step in range(steps):
        started = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            logits = model(tokens[step, :, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[step, :, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    return _figures(wall, cpu)


def trainer(precision: str, steps: int, folder: Path) -> dict:
    """The real entry point, on a data set of random tokens; times are taken around its own optimizer steps."""
    import random

    from titan5d.__main__ import main
    from titan5d.train import trainer as trainer_module

    rows = folder / "rows.jsonl"
    draw = random.Random(0)
    with rows.open("w") as out:
        for _ in range(64):
            out.write(
                json.dumps({"tokens": [draw.randrange(SIZES["vocab_size"]) for _ in range(SEQ)]}) + "\n"
            )
    marks: list[tuple[float, float]] = []
    step = trainer_module.train_step

    def timed(
        *args, **kwargs
    ):  # one mark a step: data, logging and everything between two steps is in the figure
        marks.append((time.perf_counter(), time.process_time()))
        return step(*args, **kwargs)

    trainer_module.train_step = timed
    flags = {
        "training.dataset": "tokens",
        "training.dataset_path": rows,
        "training.seq_len": SEQ,
        "training.local_batch_size": ROWS,
        "training.steps": steps + 1,
        "training.mixed_precision_param": precision,
        "model.tokenizer_path": "bytes",
        "job.dump_folder": folder / "run",
        "metrics.log_freq": 10,
        "metrics.peak_flops": "1e12",
        "optimizer.lr": "1e-3",
        **{f"model.{name}": size for name, size in SIZES.items()},
    }
    (folder / "empty.toml").write_text("")
    words = [f"--{name}={value}" for name, value in flags.items()]
    status = main(["train", "--config", str(folder / "empty.toml"), *words])
    if status:
        raise SystemExit(status)
    wall, cpu = zip(*((b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)), strict=True)
    return _figures(wall, cpu)


def _figures(wall, cpu) -> dict:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"wall": list(wall[WARMUP:]), "cpu": list(cpu[WARMUP:]), "peak": peak}


def _lower_quartile(times: Iterable[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def _child(kind: str, precision: str, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", kind, "--precision", precision, "--steps", str(steps)]
        root = str(Path(__file__).resolve().parents[2])
        env = dict(os.environ, PYTHONPATH=root, BENCH_FOLDER=folder)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", default="float32,bfloat16")
    parser.add_argument("--child", choices=("loop", "titan5d"))
    options = parser.parse_args()
    if options.child:
        if options.child == "loop":
            result = bare_loop(options.precision, options.steps)
        else:
            result = trainer(options.precision, options.steps, Path(os.environ["BENCH_FOLDER"]))
        print(json.dumps(result))
        return
    for precision in options.precision.split(","):
        results: dict[str, list[dict]] = {"loop": [], "titan5d": []}
        for _ in range(options.rounds):
            for kind, runs in results.items():
                runs.append(_child(kind, precision, options.steps))
        tps, cpu, peak = {}, {}, {}
        for kind, runs in results.items():
            tps[kind] = SEQ * ROWS / _lower_quartile(t for run in runs for t in run["wall"])
            cpu[kind] = _lower_quartile(t for run in runs for t in run["cpu"])
            peak[kind] = max(run["peak"] for run in runs)
            memory = f"{peak[kind] / 2**20:6.0f} MiB"
            print(f"{precision:9} {kind:8} {tps[kind]:8.0f} tokens/s  {cpu[kind]:.3f} CPU s/step  {memory}")
        print(
            f"{precision:9} ratio    tokens/s {tps['titan5d'] / tps['loop']:.3f}"
            f"  CPU time {cpu['loop'] / cpu['titan5d']:.3f}  (>= 0.97 asked)"
            f"  memory {peak['titan5d'] / peak['loop']:.3f}  (<= 1.05 asked)"
        )


if __name__ == "__main__":
    main()
