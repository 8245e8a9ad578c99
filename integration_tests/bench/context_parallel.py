"""Attention of one row cut over 1, 2 and 4 ranks: ring against all-gather-KV against Ulysses, in one run.

    python integration_tests/bench/context_parallel.py [--tokens 8192] [--methods ring]    CPU ranks, forked here
    torchrun --nproc-per-node 8 integration_tests/bench/context_parallel.py --device cuda    all ranks cut one row

Prints tokens/s of forward and backward, CPU seconds a rank, and the most bytes that tensors of attention took on a
rank beyond its q, k, v and the gradient of its output. Rounds alternate between the methods, so a slow moment of
the machine meets all of them. On a machine with fewer cores than ranks, tokens/s only compares the methods with
each other; CPU seconds a rank and memory show the 1 / c. CPU figures say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from titan5d.launch.local_ranks import run_ranks
from titan5d.parallel.allgather_kv import AllGatherAttention
from titan5d.parallel.attention_blocks import choose_block_kernels
from titan5d.parallel.ring import RingAttention
from titan5d.parallel.ulysses import UlyssesAttention
from titan5d.parallel.zigzag import SequenceCut

METHODS = {"ring": RingAttention, "allgather": AllGatherAttention, "ulysses": UlyssesAttention}
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64

Figures = tuple[float, float, float]
"""(seconds, CPU seconds, peak bytes) of one forward and backward on one rank."""


def measure(name: str, tokens: int, device: torch.device, dtype: torch.dtype) -> Figures:
    """Runs on every rank of the default group, which cut one row of `tokens` tokens."""
    group = dist.group.WORLD
    assert group is not None
    core = METHODS[name](group)
    attend(core, 2 * dist.get_world_size(), device, dtype)  # imports, connections, kernels
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        seconds, cpu, before = attend(core, tokens, device, dtype)
        return seconds, cpu, torch.cuda.max_memory_allocated() - before
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        seconds, cpu, _ = attend(core, tokens, device, dtype)
    allocations = [x for x in memory.profiler.kineto_results.events() if x.name() == "[memory]"]
    allocations.sort(key=lambda x: x.start_ns())
    inputs = 2 * tokens // dist.get_world_size() * (HEADS + KV_HEADS) * HEAD_DIM * dtype.itemsize
    return seconds, cpu, max(accumulate(x.nbytes() for x in allocations)) - inputs


def attend(core: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype) -> Figures:
    """Forward and backward once: (seconds, CPU seconds, bytes that CUDA held before)."""
    SequenceCut(dist.get_world_size()).chunk_len(tokens)
    local = tokens // dist.get_world_size()
    q, k, v, grad_out = (
        torch.randn(1, local, heads, HEAD_DIM, device=device, dtype=dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    for x in (q, k, v):
        x.requires_grad_()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    dist.barrier()
    started = time.perf_counter(), time.process_time()
    torch.autograd.grad(core(q, k, v), (q, k, v), grad_out)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started[0], time.process_time() - started[1], before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler writes to the terminal when it starts and stops."""
    saved, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        yield
    finally:
        for stream, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.close(nowhere)


def report(degree: int, tokens: int, name: str, rounds: list[list[Figures]], alone: dict[str, float]) -> None:
    """Prints a line. `rounds`: by round and rank. `alone` keeps the memory of one rank, to compare with."""
    seconds = statistics.median(max(wall for wall, _, _ in ranks) for ranks in rounds)
    cpu = statistics.median(max(cpu for _, cpu, _ in ranks) for ranks in rounds)
    peak = statistics.median(max(peak for _, _, peak in ranks) for ranks in rounds) / 2**20
    print(
        f"cp {degree}  {name:9} {tokens / seconds:9.0f} tokens/s  {cpu:7.2f} CPU s/rank"
        f"  {peak:8.1f} MiB/rank = {peak / alone.setdefault(name, peak):.2f} of one rank's",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192, help="length of the one row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    methods = options.methods.split(",")
    if "RANK" in os.environ:  # under torchrun
        device = torch.device(options.device)
        if options.device == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        results: dict[str, list[list[Figures]]] = {name: [] for name in methods}
        for _ in range(options.rounds):
            for name, rounds in results.items():
                by_rank: list[Figures] = [(0.0, 0.0, 0.0)] * dist.get_world_size()
                dist.all_gather_object(by_rank, measure(name, options.tokens, device, dtype))
                rounds.append(by_rank)
        if dist.get_rank() == 0:
            print(f"blocks: {choose_block_kernels(device.type, dtype, HEAD_DIM).name}")
            for name, rounds in results.items():
                report(dist.get_world_size(), options.tokens, name, rounds, {})
        dist.destroy_process_group()
        return
    if options.device == "cuda":
        parser.error("--device cuda needs one process a GPU: start it with torchrun, as shown above")
    print(
        f"one row of {options.tokens} tokens, {HEADS} heads, {KV_HEADS} KV heads, head_dim {HEAD_DIM}, fp32,"
        f" {os.cpu_count()} cores"
    )
    alone: dict[str, float] = {}
    for degree in (1, 2, 4):
        results = {name: [] for name in methods}
        for _ in range(options.rounds):
            for name, rounds in results.items():
                arguments = name, options.tokens, torch.device("cpu"), torch.float32
                rounds.append(run_ranks(measure, degree, *arguments, timeout=540))
        for name, rounds in results.items():
            report(degree, options.tokens, name, rounds, alone)


if __name__ == "__main__":
    main()
