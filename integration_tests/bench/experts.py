"""Experts on one process: one kernel for all experts, a loop over them, a dense layer of the active width; and what
routing costs.

    python integration_tests/bench/experts.py [--tokens 2048] [--dim 512] [--rounds 7] [--precision float32]

The first table: forward and backward of `Experts` on rows that are sorted already, with torch's grouped product where
it has one for the type, with the loop that stands in for it elsewhere, and of a feed-forward as wide as the experts of
one token together. The second: what a step of a small model spends on routing (router, sort, permute, combine), by the
difference between its mixtures and their bare experts. Rounds alternate; medians are compared. CPU figures say nothing
about GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from titan5d.models import grouped_mm
from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.models.experts import Experts
from titan5d.models.feed_forward import FeedForward
from titan5d.models.moe import MoE

EXPERTS, TOP_K, LAYERS = 8, 2, 4


def seconds(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """name -> median seconds of a call; calls alternate, the first round is left out."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def experts_alone(tokens: int, args: ModelArgs, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Forward and backward of the experts, of the same in a loop, and of a dense layer of the active width."""
    experts = Experts(args.n_experts, args.dim, args.moe_ffn_dim).to(dtype)
    dense = FeedForward(args.dim, args.top_k * args.moe_ffn_dim).to(dtype)
    rows = torch.randn(tokens * args.top_k, args.dim, dtype=dtype, requires_grad=True)
    x = torch.randn(tokens, args.dim, dtype=dtype, requires_grad=True)
    ends = (torch.arange(1, args.n_experts + 1) * (len(rows) // args.n_experts)).int()

    def run() -> None:
        experts(rows, ends, False).sum().backward()

    def loop() -> None:
        kernel, grouped_mm._kernel = grouped_mm._kernel, None
        run()
        grouped_mm._kernel = kernel

    return {"experts, one kernel": run, "experts, a loop": loop, "dense": lambda: dense(x).sum().backward()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    dtype = getattr(torch, options.precision)
    torch.manual_seed(0)
    args = ModelArgs(
        dim=options.dim,
        n_layers=LAYERS,
        n_heads=options.dim // 64,
        n_kv_heads=options.dim // 128,
        ffn_dim=options.dim,
        vocab_size=4096,
        n_experts=EXPERTS,
        top_k=TOP_K,
        moe_ffn_dim=options.dim,
    )
    print(f"{options.precision}, {options.tokens} tokens, hidden {args.dim}, {EXPERTS} experts, top {TOP_K}")
    found = seconds(experts_alone(options.tokens, args, dtype), options.rounds)
    for name, value in found.items():
        print(f"  {name:22} {value * 1e3:8.1f} ms   {value / found['dense']:.2f} of dense")

    model = Decoder(args).to(dtype)
    block = model.layers["0"].feed_forward
    assert isinstance(block, MoE)
    tokens = torch.randint(args.vocab_size, (options.tokens // 512, 513))
    x = torch.randn(options.tokens // 512, 512, args.dim, dtype=dtype, requires_grad=True)

    def step() -> None:
        loss, _ = model(tokens[:, :-1], labels=tokens[:, 1:])
        loss.backward()

    bare = experts_alone(options.tokens, args, dtype)["experts, one kernel"]
    found = seconds(
        {"step": step, "mixture": lambda: block(x).sum().backward(), "experts": bare}, options.rounds
    )
    routing = LAYERS * (found["mixture"] - found["experts"])
    print(f"  step {found['step'] * 1e3:.1f} ms, of which routing {routing * 1e3:.1f} ms:", end=" ")
    print(f"{routing / found['step']:.1%} (< 15 % asked)")


if __name__ == "__main__":
    main()
