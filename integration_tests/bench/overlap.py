"""What overlapping two micro-batches of a DualPipeV slot saves: step time with and without, on CPU ranks.

    python integration_tests/bench/overlap.py [--megabits 50] [--sleep 0.025] [--dim 64] [--seq-len 512] [--rounds 5]

4 ranks, 2 pipeline x 2 expert ranks, each on a node of its own whose link is that slow (network namespaces; root).
--megabits 0: no nodes, memory is the link, so there is nothing to hide and the difference is what turns cost.

Ranks must run truly side by side, however few the cores: so attention and experts of the small model also sleep that
long each, twice as long in backward. With --sleep 0 ranks compute only; with fewer cores than ranks, no core is idle
then while a rank waits, and there is no time to save. Both models are in each process and their steps alternate;
medians are compared. Exposed: seconds a step in which a rank stood still for its expert group (rows and counts), the
mean over ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from integration_tests.multinode.network import network
from integration_tests.multinode.ranks import run_on_nodes
from tests.parity import Case, build_pipeline, micro_batches, pipeline_plan
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.phases import StepPhases
from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.models.moe import MoE
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology
from titan5d.train.step import train_step

RANKS, MICROBATCHES = 4, 8
CPU = torch.device("cpu")


@dataclass
class Measured:
    """Of one way: seconds of each step, and of those how many were exposed, a step."""

    seconds: list[float]
    exposed: float


def sleep_in(model: Decoder, seconds: float) -> None:
    """Makes attention and experts of every block take longer, without a core."""
    for block in model.layers.values():
        assert isinstance(block.feed_forward, MoE) and isinstance(block.attention, nn.Module)
        for part in (block.attention, block.feed_forward.experts):
            part.register_forward_hook(lambda *_: time.sleep(seconds))
            part.register_full_backward_hook(lambda *_: time.sleep(2 * seconds))


def measure(case: Case, rounds: int, sleep: float) -> tuple[Measured, Measured]:
    """(without, with) overlap on the ranks of this process group. The first round is left out."""
    meshes = Meshes(case.topology, "cpu", has_experts=True)
    off = ActivationCheckpoint(), Compile()
    ways = []
    for overlap in (False, True):
        one = Case(**{**vars(case), "overlap": overlap})
        plan = pipeline_plan(one)
        model = build_parallel_model(
            case.args, meshes, DataParallel(case.stage), *off, torch.float32, 5, CPU, pipeline=plan
        )
        if sleep:
            sleep_in(model, sleep)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        phases = StepPhases(CPU, meshes.groups())
        ways.append((model, optimizer, build_pipeline(one, meshes, model), phases, Measured([], 0.0)))
    batches = micro_batches(case, 0, meshes.dp_rank)
    for number in range(rounds + 1):
        for model, optimizer, pipeline, phases, found in ways:
            begun = time.perf_counter()
            with phases.step():
                train_step(model, optimizer, batches, meshes, case.stage, 0.0, CPU, pipeline, phases)
            found.seconds += [time.perf_counter() - begun] * (number > 0)
            if number == 0:
                phases.metrics()
    for _, _, _, phases, found in ways:
        found.exposed = phases.metrics().get("time_exposed/ep", 0.0)
    return ways[0][-1], ways[1][-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabits", type=int, default=50)
    parser.add_argument("--sleep", type=float, default=0.025)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    args = ModelArgs(
        dim=options.dim,
        n_layers=4,
        n_heads=options.dim // 32,
        n_kv_heads=options.dim // 32,
        ffn_dim=options.dim,
        vocab_size=256,
        max_seq_len=options.seq_len,
        n_experts=8,
        top_k=2,
        moe_ffn_dim=options.dim,
    )
    case = Case(
        Topology(pp=2, dp_shard=2, ep=2),
        stage=1,
        args=args,
        valid=(options.seq_len,) * 2 * MICROBATCHES,
        seq_len=options.seq_len,
        schedule="DualPipeV",
        layout="E,t|t|t|t,N,H",
    )
    if options.megabits:
        with network(RANKS) as net:
            net.limit(options.megabits)
            ranks = run_on_nodes(net, 1, measure, case, options.rounds, options.sleep, timeout=500)
    else:
        ranks = run_ranks(measure, RANKS, case, options.rounds, options.sleep, timeout=500)
    link = f"links of {options.megabits} Mbit/s" if options.megabits else "no links"
    print(f"{MICROBATCHES} micro-batches of {options.seq_len} tokens, hidden {options.dim}, 4 layers, {link}")
    without, overlapped = ranks[0]
    for name, found in (("one after the other", without), ("overlapped", overlapped)):
        seconds = statistics.median(found.seconds)
        print(f"  {name:20} step {seconds * 1e3:7.0f} ms   exposed ep {found.exposed * 1e3:7.0f} ms")
    pairs = zip(overlapped.seconds, without.seconds, strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    print(f"  ratio {ratio:.3f} (median of the rounds)")


if __name__ == "__main__":
    main()
