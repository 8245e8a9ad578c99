"""What a split backward costs over a whole one, and every schedule's real time against its simulation.

    python integration_tests/bench/pipeline.py split [--dim 512] [--layers 4] [--device cuda] [--compile]
    python integration_tests/bench/pipeline.py schedules [--ranks 4] [--microbatches 8] [--seconds 0.05]

`split`, one process: the backward of a plain model; that of one whose weight gradients go through a store, made at
once (action B); and put off (I, then W). Rounds alternate, so a slow moment of the machine meets all of them; the
figures are medians, the costs medians of the rounds' ratios. Compiled, what waits is copied first, which costs memory
traffic.

`schedules`: stages that sleep, so that ranks run side by side however few the cores; what is left between real and
simulated time is what the runtime itself costs: messages, Python, and the machine waking ranks late.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from tests.parallel.sleeping_stages import measure, simulated
from titan5d.config.schema_execution import ActivationCheckpoint
from titan5d.launch.local_ranks import run_ranks
from titan5d.models.args import ModelArgs
from titan5d.models.decoder import Decoder
from titan5d.models.init import init_weights_
from titan5d.parallel.compile import apply_compile
from titan5d.parallel.deferred_weights import WeightGradientStore, defer_weight_gradients
from titan5d.parallel.recompute import apply_recompute
from titan5d.schedules import catalog

KEY = (0, 0)


def build(options: argparse.Namespace, recompute: str, store: WeightGradientStore | None) -> Decoder:
    args = ModelArgs(
        dim=options.dim,
        n_layers=options.layers,
        n_heads=options.dim // 64,
        n_kv_heads=options.dim // 128,
        head_dim=64,
        ffn_dim=options.dim * 7 // 2,
        vocab_size=1024,
        max_seq_len=options.tokens,
    )
    model = Decoder(args)
    init_weights_(model, seed=0)
    model = model.to(options.device, torch.bfloat16 if options.device == "cuda" else torch.float32)
    model.init_buffers(options.device)
    model.tok_embeddings = model.output = None  # a stage in the middle
    if store is not None:
        defer_weight_gradients(model, store, options.compile)
    apply_recompute(model, ActivationCheckpoint(mode=recompute), options.compile)  # type: ignore[arg-type]
    if options.compile:
        apply_compile(model, ["model"], "inductor")
    return model


def seconds(options: argparse.Namespace, run: Callable[[], None]) -> float:
    """How long `run` takes; on the CPU in processor seconds, which do not count others' work."""
    if options.device == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def put_off(store: WeightGradientStore, out: torch.Tensor, grad: torch.Tensor) -> None:
    with store.putting_off(KEY):
        out.backward(grad)


def split(options: argparse.Namespace) -> None:
    print(
        f"{options.layers} layers of width {options.dim}, {options.tokens} tokens on {options.device}"
        f"{', compiled' if options.compile else ''}; milliseconds"
    )
    print(
        "recompute    whole B   through the store: B          I          W      I + W   cost of B   cost of I + W"
    )
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    x = torch.randn(1, options.tokens, options.dim, device=options.device, dtype=dtype)
    for recompute in ("none", "selective", "full"):
        store = WeightGradientStore()
        plain, deferred = build(options, recompute, None), build(options, recompute, store)

        def forward(model: Decoder) -> torch.Tensor:
            out = model(x.detach().requires_grad_())
            assert isinstance(out, torch.Tensor)
            return out

        rows = []
        for _ in range(options.rounds + 2):
            grad = torch.randn_like(x)
            out = forward(plain)
            whole = seconds(options, partial(out.backward, grad))
            out = forward(deferred)
            at_once = seconds(options, partial(out.backward, grad))
            out = forward(deferred)
            input_half = seconds(options, partial(put_off, store, out, grad))
            weight_half = seconds(options, partial(store.run, KEY))
            rows.append((whole, at_once, input_half, weight_half))
        rows = rows[2:]  # compiled, allocated, warm
        whole, at_once, i, w = (statistics.median(column) for column in zip(*rows, strict=True))
        cost_b = statistics.median(row[1] / row[0] for row in rows) - 1
        cost = statistics.median((row[2] + row[3]) / row[0] for row in rows) - 1
        times = "".join(f"{1000 * value:11.2f}" for value in (whole, at_once, i, w, i + w))
        print(f"{recompute:9} {times}    {cost_b:+8.1%}   {cost:+8.1%}", flush=True)


def schedules(options: argparse.Namespace) -> None:
    print(
        f"{options.ranks} ranks, {options.microbatches} micro-batches, F = I = W = {options.seconds} s a rank: shortest"
        f" of {options.rounds} steps"
    )
    print("schedule                  real s   simulated s   real / simulated   held by rank")
    sizes = (options.ranks, options.microbatches, options.seconds, options.rounds)
    for name in catalog.NAMES:
        ranks = run_ranks(measure, options.ranks, (name,), *sizes, timeout=540)
        timeline, real = ranks[0][name].timeline, ranks[0][name].timeline.makespan
        expected = simulated(timeline, options.seconds)
        held = " ".join(str(rank[name].held) for rank in ranks)
        print(f"{name:22} {real:9.3f}   {expected:11.3f}   {real / expected:16.3f}   {held}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("split", "schedules"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each of F, I and W")
    options = parser.parse_args()
    split(options) if options.what == "split" else schedules(options)


if __name__ == "__main__":
    main()
