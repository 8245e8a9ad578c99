"""A prediction as text for people and as one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from titan5d.models.args import count_parameters
from titan5d.plan.advice import Advice
from titan5d.plan.assumptions import CHECKED, Assumptions
from titan5d.plan.predict import SAFE, Prediction
from titan5d.plan.quantities import GIB, gib, rate, short_bytes, short_time
from titan5d.plan.rank_memory import LINES, RankMemory, kinds

OVERLAP = (
    "hidden: a unit's gather and reduction under the computation of its neighbour; in backward the second gather of"
    " tensor parallelism and the reduce-scatter of its input's gradient; a ring's hop under the block before it; rows"
    " on their way to experts under the shared experts; pipeline messages where the table leaves room",
    "exposed: everything else, also the rows that pipeline_parallel_expert_parallel_overlap hides. Axes do not slow"
    " each other down, and no rank is late",
    "time of data reading, checkpoints and validation is not part of a step",
)


def text(prediction: Prediction, notes: Sequence[str], advice: Sequence[Advice], title: str) -> str:
    """The whole report."""
    blocks = [
        _heading(prediction, title),
        memory_table(prediction),
        verdict(prediction, advice),
        traffic_table(prediction),
        time_table(prediction),
        speed(prediction),
    ]
    if notes:
        blocks.append("notes\n" + "\n".join(f"  {note}" for note in notes))
    blocks.append(assumption_lines(prediction))
    return "\n\n".join(blocks)


def _heading(prediction: Prediction, title: str) -> str:
    case, machine = prediction.case, prediction.machine
    per_node = machine.network.per_node
    nodes, left = -(-machine.gpus // per_node), machine.gpus % per_node
    rest = f", the last with {left}" if left else ""
    total = count_parameters(case.args).total
    lines = [
        f"plan of {title} on {machine.gpus} x {machine.device.name}"
        + (f", {nodes} nodes of {per_node}{rest}" if nodes > 1 else ", one node"),
        f"  model    {total / 1e9:,.2f} G parameters, {case.args.n_layers} layers",
        f"  layout   {case.topology}; ZeRO-{case.zero_stage}; recompute {_recompute(prediction)}"
        + ("; compiled" if case.compiled else "; not compiled"),
        f"  batch    {prediction.tokens:,.0f} tokens a step: {case.topology.dp} data ranks x {case.microbatches}"
        f" micro-batches x {case.rows} rows x {case.seq_len:,} tokens",
    ]
    if case.schedule is not None:
        lines.append(
            f"  pipeline {case.schedule.name}, {case.schedule.n_stages} stages on {case.topology.pp} ranks,"
            f" bubble {prediction.time.bubble:.1%} (the table of the run, played against these times)"
        )
    return "\n".join(lines)


def _recompute(prediction: Prediction) -> str:
    recompute = prediction.case.recompute
    if recompute.mode == "none" or recompute.share == 1:
        return recompute.mode
    return f"{recompute.mode} of {recompute.share:.0%} of the blocks"


def memory_table(prediction: Prediction) -> str:
    """GiB by line, one column for each kind of rank."""
    chosen = kinds(prediction.ranks)
    several = len(chosen) > 1
    heads = [f"{one.kind}" if not several else f"rank {one.rank}: {one.kind}" for one in chosen]
    widths = [max(14, len(head) + 2) for head in heads]
    rows = [["memory of a rank at its fullest, GiB", *heads]]
    for name in LINES:
        if any(one.lines[name] for one in chosen):
            rows.append([f"  {label(name, prediction)}", *(f"{one.lines[name] / GIB:.2f}" for one in chosen)])
    rows.append(["  total", *(f"{one.total / GIB:.2f}" for one in chosen)])
    rows.append([f"  {prediction.machine.device.name} has", *(_limit(prediction) for _ in chosen)])
    rows.append(["  fullest moment", *(one.moment for one in chosen)])
    if several:
        rows.append(["  micro-batches in flight", *(f"{one.in_flight:g}" for one in chosen)])
    first = max(len(row[0]) for row in rows) + 2
    return "\n".join(
        row[0].ljust(first) + "".join(cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True))
        for row in rows
    )


def label(name: str, prediction: Prediction) -> str:
    """A line's name with what it is made of."""
    case = prediction.case
    kind = {4: "fp32", 2: "bf16"}
    return {
        "weights": f"weights as stored ({kind[case.stored]} masters)",
        "moments": f"optimizer moments ({case.optimizer:.3g} bytes a parameter)",
        "gradients": "gradients",
        "gathered weights": f"gathered weights ({kind[case.element]})",
        "activations": "activations kept",
        "recomputed block": "block being recomputed",
        "block gradients": "gradients inside a block",
        "fragmentation": f"fragmentation ({prediction.machine.assumptions.allocator:.0%} of what comes and goes)",
    }.get(name, name)


def _limit(prediction: Prediction) -> str:
    return f"{prediction.machine.device.memory / GIB:.2f}"


def verdict(prediction: Prediction, advice: Sequence[Advice]) -> str:
    """Whether it fits, and what would make it fit."""
    full, memory = prediction.fullest, prediction.machine.device.memory
    share = full.total / memory
    if prediction.fits:
        word = "fits" if prediction.verdict == "fits" else "fits, but tightly"
        line = f"{word}: {share:.0%} of the memory, {gib(prediction.margin)} are left on the fullest rank"
        if prediction.verdict == "tight":
            line += f"; below {SAFE:.0%} one can be sure"
        return line
    largest = sorted((one for one in full.lines.items() if one[1]), key=lambda one: -one[1])[:3]
    over = ", ".join(f"{name} {gib(size)}" for name, size in largest)
    lines = [
        f"does NOT fit: {gib(full.total)} on a GPU of {gib(memory)}, {gib(-prediction.margin)} too many on"
        f" {_where(full)}; the largest: {over}"
    ]
    if advice:
        lines.append("changes that would make it fit, the fastest first:")
        for one in advice:
            new = one.prediction
            lines.append(
                f"  {one}: {gib(new.fullest.total)} ({new.fullest.total / memory:.0%}),"
                f" {new.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
            )
    else:
        lines.append(
            "no single key, and no pair of keys, makes it fit: take more GPUs, GPUs with more memory, or let"
            " `titan5d plan --search` look for another layout"
        )
    return "\n".join(lines)


def _where(rank: RankMemory) -> str:
    return "every rank" if rank.kind == "all ranks" else f"pipeline rank {rank.rank} ({rank.kind})"


def traffic_table(prediction: Prediction) -> str:
    """By mesh axis, of the rank with the most work."""
    if not prediction.time.traffic:
        return "nothing is sent"
    rows = [["sent by a rank in a step", "ranks", "link", "messages", "bytes", "time", "hidden", "exposed"]]
    for one in prediction.time.traffic:
        rows.append(
            [
                f"  {one.axis}: {one.what}",
                f"{one.group.size}",
                one.group.link,
                f"{one.count:,.0f}",
                short_bytes(one.size),
                short_time(one.time),
                short_time(one.hidden),
                short_time(one.exposed),
            ]
        )
    return table(rows)


def time_table(prediction: Prediction) -> str:
    """Where the step's time goes."""
    total = prediction.time.total
    rows = [["one step of the rank with the most work", "time", "share"]]
    for name, seconds in prediction.time.parts.items():
        if seconds > 0:
            rows.append([f"  {name}", short_time(seconds), f"{seconds / total:.1%}"])
    rows.append(["  total", short_time(total), "100.0%"])
    return table(rows)


def speed(prediction: Prediction) -> str:
    """Throughput."""
    return (
        f"speed    {prediction.tokens_per_second:,.0f} tokens/s, {prediction.tokens_per_second_per_gpu:,.0f}"
        f" tokens/s/GPU, {prediction.tflops:,.0f} TFLOP/s/GPU\n"
        f"         MFU {prediction.mfu:.1%} (causal; {prediction.mfu_full:.1%} with the whole square of attention), HFU"
        f" {prediction.hfu:.1%}, of {prediction.peak / 1e12:g} TFLOP/s"
    )


def assumption_lines(prediction: Prediction) -> str:
    """Every number that was taken for granted."""
    machine = prediction.machine
    device, network = machine.device, machine.network
    checked = "compared with published runs" if device.name in CHECKED else "not compared with any run"
    lines = [
        f"assumptions for {device.name} ({checked}; set them with --assume NAME=NUMBER)",
        "  " + ", ".join(f"{name} {value:g}" for name, value in _values(machine.assumptions)),
        f"  links of one GPU, one direction: {rate(network.intra)} inside a node of {network.per_node}"
        f" ({network.intra_latency * 1e6:g} us a hop), {rate(network.inter)} between nodes"
        f" ({network.inter_latency * 1e6:g} us a hop)",
        *(f"  {line}" for line in OVERLAP),
    ]
    return "\n".join(lines)


def _values(assumptions: Assumptions) -> list[tuple[str, float]]:
    return [(field.name, getattr(assumptions, field.name)) for field in fields(assumptions)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """First column to the left, the others to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def as_object(prediction: Prediction, notes: Sequence[str], advice: Sequence[Advice]) -> dict[str, Any]:
    """Everything, in bytes, seconds and shares."""
    case, machine, time = prediction.case, prediction.machine, prediction.time
    return {
        "model": {"parameters": count_parameters(case.args).total, "layers": case.args.n_layers},
        "machine": {
            "gpu": machine.device.name,
            "gpus": machine.gpus,
            "gpus_per_node": machine.network.per_node,
            "memory": machine.device.memory,
            "intra_node_bandwidth": machine.network.intra,
            "inter_node_bandwidth": machine.network.inter,
        },
        "layout": {
            **asdict(case.topology),
            "zero_stage": case.zero_stage,
            "recompute": asdict(case.recompute),
            "microbatches": case.microbatches,
            "rows": case.rows,
            "seq_len": case.seq_len,
            "schedule": None if case.schedule is None else case.schedule.name,
            "compiled": case.compiled,
        },
        "memory": [
            {
                "rank": one.rank,
                "kind": one.kind,
                "moment": one.moment,
                "in_flight": one.in_flight,
                "total": one.total,
                "reserved": one.reserved,
                "lines": dict(one.lines),
            }
            for one in kinds(prediction.ranks)
        ],
        "fits": prediction.fits,
        "verdict": prediction.verdict,
        "margin": prediction.margin,
        "changes": [
            {
                "set": dict(one.changes),
                "total": one.prediction.fullest.total,
                "step_time": one.prediction.time.total,
            }
            for one in advice
        ],
        "traffic": [
            {
                "axis": one.axis,
                "what": one.what,
                "ranks": one.group.size,
                "ranks_in_node": one.group.in_node,
                "crosses_nodes": one.group.crosses,
                "messages": one.count,
                "bytes": one.size,
                "time": one.time,
                "hidden": one.hidden,
                "exposed": one.exposed,
            }
            for one in time.traffic
        ],
        "time": {"step": time.total, "parts": dict(time.parts), "bubble": time.bubble},
        "tokens": prediction.tokens,
        "tokens_per_second": prediction.tokens_per_second,
        "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
        "tflops": prediction.tflops,
        "mfu": prediction.mfu,
        "mfu_full_attention": prediction.mfu_full,
        "hfu": prediction.hfu,
        "peak_tflops": prediction.peak / 1e12,
        "assumptions": asdict(machine.assumptions),
        "assumed_overlap": list(OVERLAP),
        "notes": list(notes),
    }
