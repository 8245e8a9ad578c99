"""One GPU, the kernels a CPU cannot run: does each variant train as bf16 does, and as fast and as large as it should?

    python integration_tests/gpu/check_gpu.py [--flavor 1B] [--steps 20] [--batch 2] [--seq-len 4096]

Each variant is a run of its own, `titan5d train` in a process of its own, on the same tokens. Checked of each:

    loss      falls, and stays within the stated distance of the bf16 run
    memory    the allocator's peak against what the planner says of this run (plan.fits.peak_bytes)
    speed     compiled and fused variants are not slower than what they replace (5% for noise); MFU as a bound of sanity

Prints a table. Exit status: 0 all good, 1 a breach, 0 with a line that says why where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

GIB = 2**30
LEAST_MFU = 0.15
"""Below this something falls back to kernels that should not run."""
MEMORY = (0.6, 1.25)
"""Measured peak over planned peak."""
TIME_LIMIT = 900
"""Seconds for one variant, compiling included."""


@dataclass(frozen=True)
class Variant:
    """One way to run. loss: largest relative distance from bf16. faster_than: a variant it must not be slower than."""

    name: str
    flags: dict[str, str] = field(default_factory=dict)
    loss: float = 0.01
    faster_than: str = ""
    package: str = ""
    capability: tuple[int, int] = (8, 0)


COMPILE = {"compile.enable": "true"}
FLOAT8 = COMPILE | {"model.converters": '["quantize.linear.float8"]'}
VARIANTS = [
    Variant("bf16", {"model.attention_backend": "sdpa"}),
    Variant("bf16 compiled", COMPILE | {"model.attention_backend": "sdpa"}, faster_than="bf16"),
    Variant(
        "flash-attn", {"model.attention_backend": "flash_attn"}, faster_than="bf16", package="flash_attn"
    ),
    Variant(
        "flash-attn compiled",
        COMPILE | {"model.attention_backend": "flash_attn"},
        faster_than="bf16 compiled",
        package="flash_attn",
    ),
    Variant("float8 tensorwise", FLOAT8, 0.03, "bf16 compiled", "torchao", (8, 9)),
    Variant(
        "float8 rowwise",
        FLOAT8 | {"quantize.linear.float8.recipe_name": "rowwise"},
        0.03,
        package="torchao",
        capability=(8, 9),
    ),
    Variant("mxfp8", COMPILE | {"model.converters": '["quantize.linear.mx"]'}, 0.03, "", "torchao", (10, 0)),
    Variant("full recompute", COMPILE | {"activation_checkpoint.mode": "full"}),
    Variant("selective recompute", COMPILE | {"activation_checkpoint.mode": "selective"}),
    Variant("8-bit moments", {"optimizer.state_dtype": "int8"}, 0.03, package="torchao"),
]


@dataclass
class Outcome:
    """What a run measured: `problem` says what is wrong with it, "" = nothing; `skipped` why it did not run."""

    losses: list[float] = field(default_factory=list)
    tps: float = 0.0
    mfu: float = 0.0
    peak: float = 0.0
    planned: float = 0.0
    problem: str = ""
    skipped: str = ""


def words_of(variant: Variant, options: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of a variant."""
    flags = {
        "job.dump_folder": str(folder / variant.name.replace(" ", "-")),
        "model.flavor": options.flavor,
        "training.device": "cuda",
        "training.steps": str(options.steps),
        "training.local_batch_size": str(options.batch),
        "training.seq_len": str(options.seq_len),
        "lr_scheduler.warmup_steps": "2",
        "metrics.log_freq": "1",
        "metrics.enable_tensorboard": "false",
    }
    config = folder / "empty.toml"
    config.write_text("")
    return ["--config", str(config), *(f"--{key}={value}" for key, value in (flags | variant.flags).items())]


def planned_bytes(words: Sequence[str]) -> float:
    """What the planner says one rank needs at its fullest moment."""
    from titan5d.launch.run import prepare
    from titan5d.plan.fits import peak_bytes

    config, args, layout, _ = prepare(words, 1, 1)
    return peak_bytes(config, args, layout, "cuda")


def run(variant: Variant, options: argparse.Namespace, folder: Path) -> Outcome:
    """Runs one variant in a process of its own."""
    if variant.package and importlib.util.find_spec(variant.package) is None:
        return Outcome(skipped=f"{variant.package} is not installed")
    if torch.cuda.get_device_capability() < variant.capability:
        return Outcome(skipped=f"needs CUDA capability {'.'.join(map(str, variant.capability))}")
    words = words_of(variant, options, folder)
    outcome = Outcome(planned=planned_bytes(words))
    command = [sys.executable, "-m", "titan5d", "train", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        outcome.problem = f"had not ended after {TIME_LIMIT} s"
        return outcome
    if done.returncode:
        outcome.problem = f"exit status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
        return outcome
    metrics = folder / variant.name.replace(" ", "-") / "metrics.jsonl"
    points = [json.loads(line) for line in metrics.read_text().splitlines()]
    late = points[len(points) // 2 :]  # compiled and warm
    outcome.losses = [float(point["loss"]) for point in points]
    outcome.tps = median(point["tps"] for point in late)
    outcome.mfu = median(point["mfu"] or 0.0 for point in late)
    # live tensors: what is reserved beyond them is the allocator's own
    outcome.peak = GIB * max(point["memory_active_gib"] for point in points)
    return outcome


def judge(variant: Variant, outcomes: dict[str, Outcome]) -> str:
    """What is wrong with a variant that ran; nothing if all is well."""
    mine, base = outcomes[variant.name], outcomes["bf16"]
    if mine.problem:
        return mine.problem
    found = []
    if not mine.losses[-1] < mine.losses[0]:
        found.append(f"loss did not fall: {mine.losses[0]:.4f} -> {mine.losses[-1]:.4f}")
    if base.losses:
        apart = max(abs(a - b) / b for a, b in zip(mine.losses, base.losses, strict=True))
        if not apart <= variant.loss:
            found.append(f"loss is {apart:.2%} from bf16, more than {variant.loss:.0%}")
    share = mine.peak / mine.planned
    if not MEMORY[0] <= share <= MEMORY[1]:
        found.append(f"memory is {share:.2f} of the plan, not {MEMORY[0]} to {MEMORY[1]}")
    if not mine.mfu >= LEAST_MFU:
        found.append(f"MFU {mine.mfu:.1%} is below {LEAST_MFU:.0%}")
    other = outcomes.get(variant.faster_than)
    if other is not None and other.tps and mine.tps < 0.95 * other.tps:
        found.append(f"slower than {variant.faster_than}: {mine.tps:,.0f} against {other.tps:,.0f} tokens/s")
    return "; ".join(found)


def table(outcomes: dict[str, Outcome], verdicts: dict[str, str]) -> str:
    """One line a variant."""
    lines = [f"{'variant':20} {'tokens/s':>10} {'MFU':>6} {'GiB':>7} {'plan':>7} {'last loss':>10}  verdict"]
    for name, outcome in outcomes.items():
        if outcome.skipped:
            lines.append(f"{name:20} {'':44}  skipped: {outcome.skipped}")
            continue
        last = f"{outcome.losses[-1]:.4f}" if outcome.losses else "-"
        lines.append(
            f"{name:20} {outcome.tps:10,.0f} {outcome.mfu:6.1%} {outcome.peak / GIB:7.2f} {outcome.planned / GIB:7.2f}"
            f" {last:>10}  {verdicts[name] or 'ok'}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all variants; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flavor", default="1B")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, llama3 {options.flavor}")
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="titan5d-gpu-") as name:
        for variant in VARIANTS:
            outcomes[variant.name] = run(variant, options, Path(name))
            print(
                f"  {variant.name}: {outcomes[variant.name].skipped or outcomes[variant.name].problem or 'ran'}"
            )
    verdicts = {
        variant.name: "" if outcomes[variant.name].skipped else judge(variant, outcomes)
        for variant in VARIANTS
    }
    print(table(outcomes, verdicts))
    return 1 if any(verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
