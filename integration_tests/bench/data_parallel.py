"""ZeRO-2 and ZeRO-3 against FSDP2 written by hand, and eight micro-batches in one step against eight steps of one.

    python integration_tests/bench/data_parallel.py [--ranks 2,4] [--steps 10] [--precision float32]

`train_step` and the loop by hand have the same model, wrapping, optimizer and batches, on the same forked ranks. Steps
alternate, so that a slow moment of the machine meets both; medians are compared. CPU seconds (the mean over ranks) are
the figure to trust on a shared machine. What is asked for: >= 0.97 of the loop by hand. CPU figures say nothing about
GPUs.

The second table: tokens/s of one step of eight micro-batches over those of eight steps of one, and what each sends for
the same tokens, by the communication ledger.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.data.dataset import MicroBatch
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.ledger import CommunicationLedger
from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.initialize import initialize
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology
from titan5d.train.step import train_step

SIZES = ModelArgs(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=2048)
ACCUMULATION = 8
LONG, SHORT = (4, 512), (1, 256)  # rows and tokens of a micro-batch
CPU = torch.device("cpu")
Step = Callable[[list[MicroBatch]], None]


def batches(count: int, shape: tuple[int, int]) -> list[MicroBatch]:
    """Micro-batches of random tokens, other ones on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows, seq_len = shape
    tokens = torch.randint(SIZES.vocab_size, (count, rows, seq_len + 1), generator=generator)
    positions = torch.arange(seq_len).expand(rows, seq_len)
    return [MicroBatch(part[:, :-1], part[:, 1:], positions, None, [], rows * seq_len) for part in tokens]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def titan5d_step(meshes: Meshes, stage: int, dtype: torch.dtype) -> Step:
    plan = DataParallel(stage, param_dtype=dtype)
    model = build_parallel_model(
        SIZES, meshes, plan, ActivationCheckpoint(), Compile(), torch.float32, seed=0, device=CPU
    )
    optimizer = optimizer_of(model)

    def step(micro_batches: list[MicroBatch]) -> None:
        train_step(model, optimizer, micro_batches, meshes, stage, 1.0, CPU)

    return step


def by_hand_step(meshes: Meshes, stage: int, dtype: torch.dtype) -> Step:
    """What a person writes with FSDP2: the loss is averaged on each rank, gradients over ranks."""
    mesh = meshes.parameters["shard"]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    with torch.device("meta"):
        model = Decoder(SIZES)
    after_forward = stage == 3
    fully_shard(model.tok_embeddings, mesh=mesh, mp_policy=policy, reshard_after_forward=after_forward)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=after_forward)
    fully_shard([model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=after_forward)
    model.to_empty(device=CPU)
    initialize(model, 0)
    model.init_buffers(CPU)
    optimizer = optimizer_of(model)

    def step(micro_batches: list[MicroBatch]) -> None:
        total = torch.zeros(())
        for batch in micro_batches:
            loss_sum, _ = model(batch.tokens, batch.positions, None, batch.labels)
            loss = loss_sum / (batch.labels.numel() * len(micro_batches))
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)  # to be logged
        total.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(steps: dict[str, Callable[[], None]], warmup: int, rounds: int) -> dict[str, tuple[float, float]]:
    """name -> median (wall, CPU) seconds of one call; calls alternate. CPU seconds are the mean over ranks."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(warmup + rounds):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter(), time.process_time()
            step()
            used = torch.tensor(time.process_time() - started[1])
            dist.all_reduce(used)
            if index >= warmup:
                wall[name].append(time.perf_counter() - started[0])
                cpu[name].append(float(used) / dist.get_world_size())
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in steps}


def against_by_hand(stage: int, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    meshes = Meshes(Topology(dp_shard=dist.get_world_size()), "cpu")
    ours, theirs, batch = (
        titan5d_step(meshes, stage, dtype),
        by_hand_step(meshes, stage, dtype),
        batches(1, LONG),
    )
    return timed({"titan5d": lambda: ours(batch), "by hand": lambda: theirs(batch)}, 3, rounds)


def accumulated(stage: int, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    meshes = Meshes(Topology(dp_shard=dist.get_world_size()), "cpu")
    step, pieces = titan5d_step(meshes, stage, dtype), batches(ACCUMULATION, SHORT)

    def separate() -> None:
        for piece in pieces:
            step([piece])

    calls = {"one step": lambda: step(pieces), "separate": separate}
    sent = {}
    for name, call in calls.items():
        with CommunicationLedger(meshes.groups()) as ledger:
            call()
        sent[name] = ledger.total().bytes
    return timed(calls, 0, max(3, rounds // 2)) | {"sent": sent}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    dtype = getattr(torch, options.precision)
    ranks = [int(number) for number in options.ranks.split(",")]
    print(
        f"{'ranks':>5} {'stage':>5}  {'titan5d':>14} {'by hand':>14}  tokens/s ratio  CPU time ratio (>= 0.97 asked)"
    )
    for n in ranks:
        for stage in (2, 3):
            found = run_ranks(against_by_hand, n, stage, options.steps, dtype, timeout=600)[0]
            ours, theirs = found["titan5d"], found["by hand"]
            tps = [n * LONG[0] * LONG[1] / wall for wall, _ in (ours, theirs)]
            print(
                f"{n:5} {stage:5}  {tps[0]:10.0f} t/s {tps[1]:10.0f} t/s  {theirs[0] / ours[0]:14.3f}"
                f"  {theirs[1] / ours[1]:14.3f}"
            )
    print(f"\n{ACCUMULATION} micro-batches in one step against {ACCUMULATION} steps of one")
    print(f"{'ranks':>5} {'stage':>5}  tokens/s ratio  CPU time ratio  MB sent a rank: one step, separate")
    for n in ranks:
        for stage in (0, 1, 2, 3):
            found = run_ranks(accumulated, n, stage, options.steps, dtype, timeout=600)[0]
            one, separate, sent = found["one step"], found["separate"], found["sent"]
            print(
                f"{n:5} {stage:5}  {separate[0] / one[0]:14.3f}  {separate[1] / one[1]:14.3f}"
                f"  {sent['one step'] / 1e6:24.1f}  {sent['separate'] / 1e6:8.1f}"
            )


if __name__ == "__main__":
    main()
