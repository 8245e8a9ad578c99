"""What a dry run found, as a table for people and as one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from titan5d.config.check import Layout
from titan5d.config.schema import Config
from titan5d.dryrun.trace import TRACED, Assumed, RankTrace
from titan5d.hardware import GIB
from titan5d.metrics.memory_ledger import MemoryUse

PURPOSES = tuple(field.name for field in fields(MemoryUse))


def notes(config: Config, layout: Layout, assumed: Assumed, device: str, asked: Config) -> list[str]:
    """What is assumed, and what differs from a run. `asked`: the config before what cannot be traced was taken out."""
    found = [
        "bytes are those of tensors: no allocator's fragmentation, kernels' workspaces or device context"
    ]
    if layout.pipeline is None and layout.accumulation > TRACED:
        found.append(
            f"{layout.accumulation} micro-batches: the first, one between and the last are traced, and"
            f" {layout.accumulation - TRACED} more counted as the one between"
        )
    if device == "cuda":
        found.append(
            "traced with CPU operators: attention keeps q, k, v, out and one fp32 a head and query, as FlashAttention;"
            " norms keep their input and one fp32 a row, as the fused kernel. Different: sums of squares in the norm"
            " are fp64, the head's weight gradient is made from an fp32 copy of a chunk's hidden states"
        )
    if asked.compile.enable:
        found.append(
            "compile.enable: traced without the compiler, which may keep other activations, rarely more"
        )
    if asked.parallelism.enable_async_tensor_parallel:
        found.append(
            "enable_async_tensor_parallel: traced as gather, then product; the same bytes in one piece"
        )
    if config.training.enable_cpu_offload and device == "cuda":
        found.append(
            "enable_cpu_offload: weights, gradients and optimizer of the table lie in the host's memory"
        )
    if layout.topology.ep > 1:
        load = (
            "even load of all experts" if assumed.imbalance == 1 else f"{assumed.imbalance:g} x its even load"
        )
        found.append(f"experts: {load} on this rank (--imbalance)")
    if assumed.documents > 1:
        found.append(f"every row is {assumed.documents} documents of equal length")
    elif config.training.document_mask:
        found.append("every row is one document (--documents N: N of equal length, and a mask for them)")
    return found


def as_dict(layout: Layout, traces: Sequence[RankTrace], remarks: Sequence[str]) -> dict[str, Any]:
    """Bytes and FLOPs, whole numbers; one entry a rank."""
    return {
        "layout": str(layout.topology),
        "world_size": layout.topology.world_size,
        "zero_stage": layout.zero_stage,
        "micro_batches": micro_batches(layout),
        "notes": list(remarks),
        "ranks": [_rank_dict(trace) for trace in traces],
    }


def micro_batches(layout: Layout) -> int:
    """Forward passes of a rank in a step."""
    return layout.accumulation if layout.pipeline is None else layout.pipeline.schedule.microbatches


def _rank_dict(trace: RankTrace) -> dict[str, Any]:
    return {
        "rank": trace.kind.rank,
        "kind": trace.kind.name,
        "peak": asdict(trace.peak) | {"total": trace.peak.total},
        "peak_moment": str(trace.peak_moment),
        "highest": asdict(trace.highest),
        "timeline": [
            {"moment": str(moment), "total": use.total, **asdict(use)}
            for moment, use in trace.timeline.items()
        ],
        "communication": [
            {"axis": entry.axis, "op": entry.op, "dtype": entry.dtype, **asdict(entry.traffic)}
            for entry in trace.traffic
        ],
        "flops": {"products": trace.product_flops, "attention": trace.attention_flops},
        "garbage": trace.garbage,
        "seconds": round(trace.seconds, 3),
    }


def as_text(layout: Layout, traces: Sequence[RankTrace], remarks: Sequence[str]) -> str:
    """The tables."""
    lines = [
        f"dry run of {layout.topology.world_size:,} ranks ({layout.topology}), zero_stage {layout.zero_stage},"
        f" {micro_batches(layout)} micro-batches a step"
    ]
    for trace in traces:
        lines += [
            "",
            str(trace.kind),
            *_memory(trace),
            *_phases(trace),
            *_traffic(trace),
            *_flops(trace),
            *_garbage(trace),
        ]
    return "\n".join([*lines, "", *(f"note: {remark}" for remark in remarks)])


def _memory(trace: RankTrace) -> list[str]:
    lines = [f"  {'memory, GiB':22} {'at the peak':>12} {'at most':>12}"]
    for purpose in PURPOSES:
        peak, highest = getattr(trace.peak, purpose), getattr(trace.highest, purpose)
        lines.append(f"  {purpose:22} {peak / GIB:12.3f} {highest / GIB:12.3f}")
    lines.append(f"  {'total':22} {trace.peak.total / GIB:12.3f}   in {trace.peak_moment}")
    return lines


def _phases(trace: RankTrace) -> list[str]:
    fullest: dict[str, tuple[int, str]] = {}
    for moment, use in trace.timeline.items():
        if use.total > fullest.get(moment.phase, (0, ""))[0]:
            fullest[moment.phase] = use.total, str(moment)
    lines = [f"  {'over the step':22} {'GiB':>12}"]
    return lines + [f"  {phase:22} {total / GIB:12.3f}   in {at}" for phase, (total, at) in fullest.items()]


def _traffic(trace: RankTrace) -> list[str]:
    if not trace.traffic:
        return ["  no communication"]
    lines = [f"  {'axis':22} {'op':14} {'type':10} {'count':>8} {'GiB sent':>12}"]
    for entry in trace.traffic:
        traffic = entry.traffic
        lines.append(
            f"  {entry.axis:22} {entry.op:14} {entry.dtype:10} {traffic.count:8,} {traffic.bytes / GIB:12.4f}"
        )
    return lines


def _garbage(trace: RankTrace) -> list[str]:
    if not trace.garbage:
        return []
    return [
        f"  {trace.garbage / GIB:.3f} GiB stay after the step until the garbage collector runs: a circle of references"
    ]


def _flops(trace: RankTrace) -> list[str]:
    return [
        f"  {(trace.product_flops + trace.attention_flops) / 1e12:,.4g} TFLOP: {trace.product_flops / 1e12:,.4g} in"
        f" matrix products, {trace.attention_flops / 1e12:,.4g} in attention; traced in {trace.seconds:.1f} s"
    ]
