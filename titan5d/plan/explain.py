"""Why the layout that a search found is the fastest: what each other choice would cost, in words and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from titan5d.plan.layouts import Candidate5, Priors
from titan5d.plan.predict import Machine, Prediction, predict
from titan5d.plan.quantities import gib, short_time
from titan5d.plan.report import table
from titan5d.plan.search import Fitting, SearchResult

Choice = Callable[[Candidate5], object]

CHOICES: tuple[tuple[str, Choice], ...] = (
    ("tensor degree", lambda layout: layout.topology.tp),
    ("context degree", lambda layout: layout.topology.cp),
    ("pipeline degree", lambda layout: layout.topology.pp),
    ("expert degree", lambda layout: layout.topology.ep),
    ("replicas", lambda layout: layout.topology.dp_replicate),
    ("ZeRO stage", lambda layout: layout.zero_stage),
    ("recompute", lambda layout: layout.recompute),
    ("rows of a micro-batch", lambda layout: layout.rows),
    ("schedule", lambda layout: (layout.schedule, layout.chunks)),
)
"""What is compared, one after the other."""

REASONS = {
    "recompute": "it computes more again",
    "tensor communication": "it waits longer for tensor ranks",
    "context communication": "it waits longer for context ranks",
    "expert communication": "it waits longer for experts",
    "data communication": "less of its data communication is hidden",
    "pipeline bubble": "its pipeline idles more",
    "slowed by hidden communication": "what is hidden slows it more",
    "computing": "its products are smaller, or its ranks have more to compute",
    "update and overhead": "its update takes longer",
}


def ranking(result: SearchResult) -> str:
    """The table of the best."""
    rows = [["layout", "tokens/s/GPU", "MFU", "step", "memory", "bubble"]]
    for number, (layout, prediction) in enumerate(result.best, 1):
        rows.append(
            [
                f"{number:>3}  {layout}",
                f"{prediction.tokens_per_second_per_gpu:,.0f}",
                f"{prediction.mfu:.1%}",
                short_time(prediction.time.total),
                gib(prediction.fullest.total),
                f"{prediction.time.bubble:.1%}",
            ]
        )
    return table(rows)


def why(result: SearchResult, machine: Machine) -> list[str]:
    """One line for each choice that had an alternative."""
    layout, winner = result.best[0]
    lines = []
    for name, choice in CHOICES:
        mine = choice(layout)
        others: dict[object, Fitting] = {}
        for candidate in result.fitting:  # by floor, so the first of each value is its most promising
            value = choice(candidate.layout)
            if value != mine:
                others.setdefault(value, candidate)
        if not others:
            continue
        played = [(value, one, predict(one.case, machine)) for value, one in list(others.items())[:4]]
        value, candidate, found = min(played, key=lambda one: one[2].time.total)
        lines.append(
            f"{name} {_word(mine)}: the best with {_word(value)} ({candidate.layout}) is"
            f" {found.time.total / winner.time.total - 1:.1%} slower; {_reason(winner, found)}"
        )
    return lines


def _word(value: object) -> str:
    if isinstance(value, tuple):
        name, chunks = value
        return f"{name or 'none'}" + (f" v={chunks}" if chunks > 1 else "")
    return str(value)


def _reason(winner: Prediction, other: Prediction) -> str:
    """The part of the step that grew most."""
    grown = {name: seconds - winner.time.parts.get(name, 0.0) for name, seconds in other.time.parts.items()}
    name = max(grown, key=lambda each: grown[each])
    if grown[name] <= 0:
        return "they are equal"
    return f"{REASONS[name]} (+{short_time(grown[name])} a step)"


def rejections(rejected: Counter[str]) -> list[str]:
    """How many layouts were not ranked, by reason, the most frequent first."""
    return [f"{count:>6}  {reason}" for reason, count in rejected.most_common()]


def nothing_fits(result: SearchResult, machine: Machine) -> str:
    """What to say when there is no winner."""
    memory = machine.device.memory
    if result.nearest is None:
        return "no layout is legal for this model, batch and number of GPUs; the reasons are counted below"
    layout, need = result.nearest
    return (
        f"no layout fits: the one that needs least, {layout}, needs {gib(need)} of {gib(memory)}. Take more GPUs,"
        " shorter rows, or widen the search (--fill, --cp-from, --pp-from)"
    )


def search_text(result: SearchResult, machine: Machine, priors: Priors, seconds: float) -> str:
    """The whole answer of a search, but for the winner's own report."""
    counted = "\n".join(f"  {line}" for line in rejections(result.rejected))
    blocks = [
        f"{result.tried:,} layouts in {seconds:.1f} s, {len(result.fitting):,} kept (of modes and stages that fit, the"
        " fastest)",
        "tried by these rules of thumb, each of which a flag changes:\n"
        + "\n".join(f"  {line}" for line in priors.lines()),
    ]
    if result.best:
        blocks.append(ranking(result))
        blocks.append(
            "why the first:\n"
            + "\n".join(f"  {line}" for line in why(result, machine) or ["there is no other"])
        )
    else:
        blocks.append(nothing_fits(result, machine))
    if counted:
        blocks.append("not ranked:\n" + counted)
    return "\n\n".join(blocks)
