"""The page of what composes with what: every cell is a run of `titan5d verify`, or the reason why there is none.

    titan5d verify --composition docs/composition.md

Rows are options, columns are layouts they meet. A cell that config/check.py refuses costs nothing; so the page without
its numbers can be made at once, which is how a test sees that the file is that of this version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from titan5d.config.load import ConfigError, load_config
from titan5d.launch.local_ranks import RankFailed
from titan5d.verify.case import case_of
from titan5d.verify.layouts import Cuts, parse_layouts
from titan5d.verify.run import run_layout, run_reference
from titan5d.verify.shrink import Small, shrink

SINGLE = "dp2, r2dp2, tp2, cp2, pp2"
WITH_DATA = "dp2, dp4, r2, r2dp2, dp2tp2, dp2cp2, dp2pp2"
WITH_TENSOR = "tp2, dp2tp2, tp2cp2, tp2pp2"
WITH_CONTEXT = "cp2, dp2cp2, tp2cp2, cp2pp2"
WITH_PIPELINE = "pp2, dp2pp2, tp2pp2, cp2pp2"
WITH_EXPERTS = "dp2ep2, dp4ep2, r2dp2ep2, tp2ep2, cp2ep2, dp2pp2ep2"
DENSE, EXPERTS = ("--config", "quickstart"), ("--config", "moe_debug")
LATENT = ("--config", "deepseek_v3_671b", "--parallelism.zero_stage", "3")


@dataclass(frozen=True)
class Line:
    """A row: what is set besides the config it starts from."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A table of options that meet the same layouts."""

    title: str
    text: str
    layouts: str
    lines: tuple[Line, ...]


def _dense(name: str, *words: str) -> Line:
    return Line(name, (*DENSE, *words))


def _experts(name: str, *words: str) -> Line:
    return Line(name, (*EXPERTS, *words))


def _schedule(name: str) -> Line:
    return _dense(f"`pipeline_parallel_schedule = {name}`", "--parallelism.pipeline_parallel_schedule", name)


def _overlapped(name: str, *words: str) -> Line:
    overlap = "--parallelism.pipeline_parallel_expert_parallel_overlap=true"
    degrees = "--parallelism.pipeline_parallel_degree=2", "--parallelism.expert_parallel_degree=2"
    return _experts(name, overlap, "--parallelism.pipeline_parallel_schedule=DualPipeV", *degrees, *words)


SECTIONS = (
    Section(
        "Cuts with cuts",
        "Every two cuts, the three that are run together most, and all of them.",
        "dp2, r2, tp2, cp2, pp2, r2dp2, dp2tp2, dp2cp2, dp2pp2, tp2cp2, tp2pp2, cp2pp2, dp2tp2pp2, dp2tp2cp2, r2dp2tp2,"
        " dp2tp2cp2pp2",
        (_dense("dense"), _experts("experts, each rank all of them")),
    ),
    Section(
        "Experts with cuts",
        "`ep2`: the experts are shared by two of the ranks that are there anyway; `etp2`: the width of each is.",
        f"{WITH_EXPERTS}, dp4ep2etp2, tp2etp2, dp4pp2ep2, dp2tp2cp2pp2ep4",
        (
            _experts("softmax scores, losses of balance"),
            Line("DeepSeek-V3: latent attention, shared experts, groups, bias", LATENT),
        ),
    ),
    Section(
        "Data",
        "ZeRO stages (docs/data_parallel.md).",
        WITH_DATA,
        (
            *(
                _dense(f"`zero_stage = {stage}`", "--parallelism.zero_stage", str(stage))
                for stage in range(4)
            ),
            _dense(
                "`zero_stage = 3`, `zero_reshard_degree = 2`",
                "--parallelism.zero_stage=3",
                "--parallelism.zero_reshard_degree=2",
            ),
        ),
    ),
    Section(
        "Tensor",
        "docs/tensor_parallel.md.",
        WITH_TENSOR,
        (
            _dense("`sequence_parallel = false`", "--parallelism.sequence_parallel", "false"),
            _dense("`disable_loss_parallel = true`", "--parallelism.disable_loss_parallel", "true"),
            _dense(
                "`tensor_parallel_regather_input = false`",
                "--parallelism.tensor_parallel_regather_input",
                "false",
            ),
            _experts("`sequence_parallel = false`, experts", "--parallelism.sequence_parallel", "false"),
        ),
    ),
    Section(
        "Context",
        "docs/context_parallel.md.",
        WITH_CONTEXT,
        (
            _dense("`context_parallel_method = ring`", "--parallelism.context_parallel_method", "ring"),
            _dense("`allgather`", "--parallelism.context_parallel_method", "allgather"),
            _dense("`ulysses`", "--parallelism.context_parallel_method", "ulysses"),
            _dense(
                "`context_parallel_load_balancer = none`",
                "--parallelism.context_parallel_load_balancer",
                "none",
            ),
        ),
    ),
    Section(
        "Pipeline",
        "docs/pipeline_parallel.md.",
        WITH_PIPELINE,
        tuple(
            _schedule(name)
            for name in (
                "GPipe",
                "1F1B",
                "Interleaved1F1B",
                "LoopedBFS",
                "InterleavedZeroBubble",
                "ZBVZeroBubble",
                "DualPipeV",
            )
        ),
    ),
    Section(
        "Balance of experts",
        "docs/experts.md.",
        WITH_EXPERTS,
        (
            _experts("`aux_loss_kind = global_batch`", "--moe.aux_loss_kind", "global_batch"),
            _experts("`aux_loss_kind = micro_batch`", "--moe.aux_loss_kind", "micro_batch"),
            _experts(
                "the same, `pipeline_parallel_microbatch_size = local_batch_size`",
                "--moe.aux_loss_kind=micro_batch",
                "--parallelism.pipeline_parallel_microbatch_size=2",
            ),
            _experts("`capacity_factor = 0.75`", "--moe.capacity_factor", "0.75"),
            _experts("`score_before_w2 = true`", "--moe.score_before_w2", "true"),
        ),
    ),
    Section(
        "Two micro-batches at once",
        "`pipeline_parallel_expert_parallel_overlap` (docs/pipeline_parallel.md).",
        "dp2pp2ep2, tp2pp2ep2, cp2pp2ep2, dp4pp2ep2etp2",
        (
            _overlapped("DualPipeV"),
            _overlapped("`activation_checkpoint.mode = full`", "--activation_checkpoint.mode=full"),
        ),
    ),
    Section(
        "Recompute, compile, memory, data",
        "",
        f"{SINGLE}, dp2tp2",
        (
            _dense("`activation_checkpoint.mode = full`", "--activation_checkpoint.mode", "full"),
            _dense("`activation_checkpoint.mode = selective`", "--activation_checkpoint.mode", "selective"),
            _dense("`compile.enable = true`", "--compile.enable", "true"),
            _dense("`training.enable_cpu_offload = true`", "--training.enable_cpu_offload", "true"),
            _dense("`training.document_mask = false`", "--training.document_mask", "false"),
            _dense("`model.tie_embeddings = true`", "--model.tie_embeddings", "true"),
        ),
    ),
)

HEAD = """# What composes with what

Made by `titan5d verify --composition docs/composition.md`; a test fails when it is not that of this version. Never
edited by hand.

Each cell is a run of `titan5d verify` (docs/verify.md): a small case of the config with this option, executed by this
layout on CPU ranks, against one process: loss, every gradient, norm, weights after three steps, router statistics,
logged numbers; uneven targets, documents, accumulation and clipping on. The number is the largest relative error of any
gradient (1e-5 is allowed); `breach` or `failed` would stand where a check fails. A refused cell names its reason below
the table. Layouts are written as in docs/verify.md: `r2dp2` = 2 replicas of 2 sharding ranks (HSDP).
"""
_NUMBER = re.compile(r"\b\d\.\de[+-]\d\d\b")

Measure = Callable[[Small], Callable[[Cuts], str]]
"""The small case of a row -> what gives the cell of a legal layout."""


def page(measure: Measure) -> str:
    """The page with the cells that `measure` gives."""
    parts = [HEAD]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        if section.text:
            parts.append(f"{section.text}\n")
        parts.append(_table(section, measure))
    return "\n".join(parts)


def without_numbers(text: str) -> str:
    """The page with `=` for every number: what does not depend on a run."""
    return _NUMBER.sub("=", text)


def measured_page(limit: float, tell: Callable[[str], None]) -> tuple[str, int]:
    """(the page with all its runs; exit status: 0 all equal, 1 not).

    Args:
        limit: seconds one run may take.
        tell: hears of each run.
    """
    statuses: list[str] = []

    def measure(small: Small) -> Callable[[Cuts], str]:
        try:
            expected = run_reference(small, limit)
        except RankFailed as failed:
            tell(f"the reference failed: {failed}")
            statuses.append("failed")
            return lambda cuts: "failed"

        def cell(cuts: Cuts) -> str:
            row = run_layout(small, cuts, expected, limit)
            tell(f"{cuts}: {row.status} {row.message}")
            statuses.append(row.status)
            return f"{row.checks['gradients'].error:.1e}" if row.status == "equal" else row.status

        return cell

    text = page(measure)
    return text, 0 if set(statuses) == {"equal"} else 1


def _table(section: Section, measure: Measure) -> str:
    layouts = parse_layouts(section.layouts)
    rows = [f"| | {' | '.join(f'`{cuts}`' for cuts in layouts)} |", f"|---|{'---|' * len(layouts)}"]
    reasons: list[str] = []
    for line in section.lines:
        small = shrink(load_config(line.words), layouts)
        cell, cells = measure(small), []
        for cuts in layouts:
            try:
                case_of(small, cuts)
            except ConfigError as error:
                reason = "; ".join(error.problems)
                if reason not in reasons:
                    reasons.append(reason)
                cells.append(f"refused ({reasons.index(reason) + 1})")
            else:
                cells.append(cell(cuts))
        rows.append(f"| {line.name} | {' | '.join(cells)} |")
    notes = [f"({number}) {reason}\n" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*rows, "", *notes])
