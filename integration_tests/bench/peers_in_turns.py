"""Trainers side by side, step by step: all are started, and take turns at the cores.

    python integration_tests/bench/peers_in_turns.py HARNESS [--layouts single,ddp2,...] [--precision fp32] [--steps 40]

    step 1   plain | torchtitan | titan5d        who waits for its turn sleeps
    step 2   torchtitan | titan5d | plain
    ...

A machine whose speed drifts by a tenth from minute to minute cannot tell trainers that differ by a hundredth when they
run one after the other. Here every step of one is compared with the same step of the others, a second later: the ratio
printed is the median of these ratios. HARNESS is the folder described in peers.py, whose bench.py knows how the other
trainers are started. CPU figures say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import select
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = "plain,tt"
SAME = {"compile": "single_compile"}  # names of the same layout
LAYOUTS = "single,single_compile,ddp2,fsdp2,tp2,pp2_1f1b,cp2,moe_single,moe_ep2"
LIMIT, SETTLE, WARMUP = 300.0, 0.01, 5
DRIVER = Path(__file__).with_name("peers.py")


def rank_main(harness: str, go: str, done: str, script: str, *args: str) -> None:
    """One rank of one trainer: its driver, each step of which waits for a byte in `go` and answers with one."""
    sys.path.insert(0, harness)
    import common  # type: ignore[import-not-found]

    start, stop = common.Recorder.start, common.Recorder.stop

    def start_in_turn(recorder: Any) -> None:
        if not os.read(int(go), 1):
            raise SystemExit("no more turns")
        start(recorder)

    def stop_in_turn(recorder: Any) -> None:
        stop(recorder)
        os.write(int(done), b".")

    common.Recorder.start, common.Recorder.stop = start_in_turn, stop_in_turn
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


class Rank:
    """A rank under way."""

    def __init__(self, harness: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        go, self._go = os.pipe()
        self._done, done = os.pipe()
        python, *script = command
        command = [python, __file__, "--rank", harness, str(go), str(done), *script]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=os.environ | environment, stdout=out, stderr=out, pass_fds=(go, done)
            )
        os.close(go)
        os.close(done)
        self._log = log

    def go(self) -> None:
        os.write(self._go, b".")

    def wait(self) -> None:
        """Returns when the step is done. Raises RuntimeError if the rank ends or takes too long."""
        if not select.select([self._done], [], [], LIMIT)[0] or not os.read(self._done, 1):
            raise RuntimeError(f"failed or too slow: see {self._log}")


@dataclass
class Trainer:
    """A trainer under way, and what it left."""

    name: str
    command: list[str]
    environment: dict[str, str]
    size: int
    running: list[Rank] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [max(times) for times in zip(*(result["t"] for result in self.results), strict=True)][WARMUP:]

    @property
    def losses(self) -> tuple[float, float]:
        known = {int(step): loss for result in self.results for step, loss in result["loss"].items() if loss}
        return known[min(known)], known[max(known)]


def trainers_of(bench: Any, names: list[str], harness: str, layout: str, precision: str) -> list[Trainer]:
    """Those in `names` that have the layout; ours is the last."""
    found = [
        Trainer(peer, command, environment, ranks)
        for peer, name, kind, ranks, command, environment in bench.R
        if peer in names and SAME.get(name, name) == layout and kind == precision
    ]
    ranks = 1 if "single" in layout else 2
    shape = {"BENCH_SHAPE": "moe"} if layout.startswith("moe") else {}
    own = [sys.executable, str(DRIVER), harness, layout, precision]
    return [*found, Trainer("titan5d", own, shape, ranks)]


def run(trainers: list[Trainer], harness: str, folder: Path, steps: int) -> None:
    """Lets them step in turns."""
    shutil.rmtree(folder, ignore_errors=True)
    for trainer in trainers:
        out, port = folder / trainer.name, _free_port()
        out.mkdir(parents=True)
        for number in range(trainer.size):
            environment = trainer.environment | {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(trainer.size),
                "LOCAL_WORLD_SIZE": str(trainer.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // trainer.size)),
                "OMP_WAIT_POLICY": "passive",
                "GOMP_SPINCOUNT": "0",
                "GLOO_SOCKET_IFNAME": "lo",
                "CUDA_VISIBLE_DEVICES": "",
                "BENCH_OUT": str(out),
                "BENCH_STEPS": str(steps),
                "BENCH_WARMUP": str(WARMUP),
            }
            trainer.running.append(Rank(harness, trainer.command, environment, out / f"log{number}"))
    try:
        for step in range(steps):
            first = step % len(trainers)
            for trainer in trainers[first:] + trainers[:first]:
                for rank in trainer.running:
                    rank.go()
                for rank in trainer.running:
                    rank.wait()
                time.sleep(SETTLE)
        for trainer in trainers:
            for rank in trainer.running:
                rank.process.wait(LIMIT)
    finally:
        for trainer in trainers:
            for rank in trainer.running:
                rank.process.kill()
    for trainer in trainers:
        files = [folder / trainer.name / f"rank{number}.json" for number in range(trainer.size)]
        trainer.results = [json.loads(file.read_text()) for file in files]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("harness")
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--trainers", default=PEERS, help="besides ours")
    parser.add_argument(
        "--add", action="append", default=[], help="NAME:LAYOUT:PRECISION:RANKS:COMMAND, another"
    )
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=40, help="of which 5 warm up")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    sys.path.insert(0, options.harness)
    import bench  # type: ignore[import-not-found]
    import common

    for another in options.add:
        name, layout, precision, ranks, command = another.split(":", 4)
        bench.R.append((name, layout, precision, int(ranks), shlex.split(command), {}))
    names = [*options.trainers.split(","), *(another.split(":")[0] for another in options.add)]
    print(f"{'layout':15} {'trainer':8} {'tokens/s':>8} {'ours/its':>8} {'faster':>7} {'MiB':>5}  losses")
    rows = []
    for layout in options.layouts.split(","):
        trainers = trainers_of(bench, names, options.harness, layout, options.precision)
        folder = Path(common.BASE) / "out" / f"turns_{layout}_{options.precision}"
        run(trainers, options.harness, folder, options.steps)
        shape = common.SHAPES["moe" if layout.startswith("moe") else "small"]
        ours = trainers[-1].seconds
        for trainer in trainers:
            ratios = [its / own for its, own in zip(trainer.seconds, ours, strict=True)]
            row = {
                "layout": layout,
                "trainer": trainer.name,
                "tokens_per_s": shape["seq"] * shape["batch"] / statistics.median(trainer.seconds),
                "speed_of_ours": statistics.median(ratios),
                "steps_ours_is_faster": sum(ratio > 1 for ratio in ratios) / len(ratios),
                "peak_mib": max(result["rss_peak"] for result in trainer.results),
                "losses": trainer.losses,
            }
            rows.append(row)
            print(
                f"{layout:15} {trainer.name:8} {row['tokens_per_s']:8.0f} {row['speed_of_ours']:8.3f}"
                f" {row['steps_ours_is_faster']:7.0%} {row['peak_mib']:5.0f}"
                f"  {trainer.losses[0]:.4f} -> {trainer.losses[1]:.4f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    else:
        sys.exit(main())
