"""What saving costs: the stall of a training step, and the bandwidth, against a plain write of the same bytes.

    PYTHONPATH=. python integration_tests/bench/checkpoint.py [--ranks 2] [--rounds 5] [--dim 512] [--folder DIR]

In one run, in turn: a plain write of the checkpoint's bytes by as many processes (flushed to the disk), a sync save, an
async save. An async save stalls training only for its copy in memory; while it is written, training goes on. What is
asked for: stall <= 20 % of a sync save. Medians; figures of a CPU machine and its disk say nothing about others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from titan5d.launch.local_ranks import run_ranks


def words(folder: Path, dim: int) -> list[str]:
    """A run of one step, whose trainer then saves again and again."""
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"tokens": [*range(32)], "labels": [*range(32)]}) + "\n" for _ in range(8))
    )
    (folder / "empty.toml").write_text("")
    flags = {
        "model.dim": dim,
        "model.ffn_dim": 3 * dim,
        "training.dataset": "tokens",
        "training.dataset_path": rows,
        "training.seq_len": 32,
        "training.local_batch_size": 1,
        "training.steps": 1,
        "training.mixed_precision_param": "float32",
        "metrics.peak_flops": "1e12",
        "metrics.enable_tensorboard": "false",
        "checkpoint.enable": "true",
        "checkpoint.last_save_model_only": "false",
        "checkpoint.keep_latest_k": 1,
        "job.dump_folder": folder / "run",
    }
    return ["--config", str(folder / "empty.toml"), *(f"--{key}={value}" for key, value in flags.items())]


def measure(argv: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds on this rank by kind of save, and the bytes of its share."""
    import torch
    import torch.distributed as dist

    from titan5d.launch.run import open_data, prepare
    from titan5d.train.trainer import Trainer

    rank, world = dist.get_rank(), dist.get_world_size()
    config, args, layout, _ = prepare(argv, world, world)
    loader, _ = open_data(config, args, layout, rank)
    trainer = Trainer(config, args, layout, loader, None, torch.device("cpu"))
    trainer.run()
    saves, folder = trainer.checkpoints, trainer.checkpoints.folder
    size = (folder / "step-1" / f"rank-{rank:05d}.safetensors").stat().st_size
    content = torch.empty(size, dtype=torch.uint8).random_().numpy().data
    seconds: dict[str, list[float]] = {"bytes": [size], "plain": [], "sync": [], "stall": [], "async": []}
    for number in range(rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        with (folder / f"plain-{rank}").open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        dist.barrier()
        plain = time.perf_counter() - started
        saves.config.async_mode = "disabled"
        started = time.perf_counter()
        saves.save(100 + 2 * number, {})
        sync = time.perf_counter() - started
        dist.barrier()
        saves.config.async_mode = "async"
        started = time.perf_counter()
        saves.save(101 + 2 * number, {})
        stall = time.perf_counter() - started
        saves.close()
        whole = time.perf_counter() - started
        if number:  # the first round makes the staging memory
            for name, value in (("plain", plain), ("sync", sync), ("stall", stall), ("async", whole)):
                seconds[name].append(value)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="titan5d-bench-") as folder:
        ranks = run_ranks(measure, given.ranks, words(Path(folder), given.dim), given.rounds, timeout=600)
    size = sum(rank["bytes"][0] for rank in ranks)
    slowest = {
        name: statistics.median(max(values) for values in zip(*(rank[name] for rank in ranks), strict=True))
        for name in ("plain", "sync", "stall", "async")
    }
    print(f"{given.ranks} ranks, {size / 1e6:.1f} MB, medians of {given.rounds} rounds")
    for name, what in (
        ("plain", "plain write, flushed"),
        ("sync", "sync save"),
        ("async", "async save, until complete"),
    ):
        print(f"  {what:<28} {slowest[name]:8.3f} s  {size / slowest[name] / 1e6:8.1f} MB/s")
    share = slowest["stall"] / slowest["sync"]
    print(
        f"  {'async save, stall of a step':<28} {slowest['stall']:8.3f} s  {100 * share:8.1f} % of a sync save"
    )


if __name__ == "__main__":
    main()
