"""The report as a page that needs nothing else: memory against the limit, traffic, time, the schedule, the ranking."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from titan5d.plan import svg
from titan5d.plan.advice import Advice
from titan5d.plan.predict import Prediction
from titan5d.plan.quantities import GIB, gib, short_bytes, short_time
from titan5d.plan.rank_memory import LINES, kinds
from titan5d.plan.report import assumption_lines, speed, verdict
from titan5d.schedules import draw

MOST_BARS = 6000
"""A schedule with more actions is not drawn: no eye could tell them apart."""

_STYLE = """
body { font: 14px "DejaVu Sans", Verdana, Arial, sans-serif; margin: 24px;
  color: #222; background: #fff; max-width: 1000px }
h1 { font-size: 22px } h2 { font-size: 17px; margin-top: 28px }
pre { background: #f6f6f6; padding: 10px; white-space: pre-wrap }
.over { color: #c0262d; font-weight: bold } .fits { color: #268468; font-weight: bold }
.tight { color: #a66a00; font-weight: bold }
.scroll { overflow-x: auto } svg { display: block }
.fitting svg { max-width: 100%; min-width: 640px; height: auto }
"""


def page(
    prediction: Prediction, notes: Sequence[str], advice: Sequence[Advice], title: str, ranking: str = ""
) -> str:
    """A whole HTML document. ranking: text of a search, if there was one."""
    case = prediction.case
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8"/>',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{prediction.machine.gpus} x {escape(prediction.machine.device.name)}, {escape(str(case.topology))}, ZeRO-"
        f"{case.zero_stage}, recompute {case.recompute.mode}, {case.microbatches} micro-batches of {case.rows} rows of"
        f" {case.seq_len:,} tokens</p>",
        f'<p class="{prediction.verdict}">{escape(verdict(prediction, ()).splitlines()[0])}</p>',
        *(f"<p>Would make it fit: <code>{escape(str(one))}</code></p>" for one in advice),
        "<h2>Memory of a rank at its fullest moment</h2>",
        '<div class="scroll fitting">' + memory_picture(prediction) + "</div>",
        "<h2>One step</h2>",
        '<div class="scroll fitting">' + time_picture(prediction) + "</div>",
        f"<pre>{escape(speed(prediction))}</pre>",
        "<h2>What a rank sends in a step, by axis</h2>",
        '<div class="scroll fitting">' + traffic_picture(prediction) + "</div>",
    ]
    if prediction.time.timeline is not None:
        parts += ["<h2>The schedule, with these times</h2>", _schedule(prediction)]
    if ranking:
        parts += ["<h2>Search</h2>", f"<pre>{escape(ranking)}</pre>"]
    if notes:
        parts += ["<h2>Notes</h2>", *(f"<p>{escape(note)}</p>" for note in notes)]
    parts += [
        "<h2>Assumptions</h2>",
        f"<pre>{escape(assumption_lines(prediction))}</pre>",
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(parts)


def memory_picture(prediction: Prediction) -> str:
    """One bar for each kind of rank."""
    limit = prediction.machine.device.memory / GIB
    bars: list[svg.Bar] = []
    for one in kinds(prediction.ranks):
        name = one.kind if one.kind == "all ranks" else f"rank {one.rank}: {one.kind}"
        bars.append((name, [(line, one.lines[line] / GIB) for line in LINES], gib(one.total)))
    return svg.stacked_bars(
        bars, LINES, limit, f"{prediction.machine.device.name} has {limit:.1f} GiB", "GiB"
    )


def time_picture(prediction: Prediction) -> str:
    """The step as one bar."""
    names = list(prediction.time.parts)
    pieces = [(name, max(0.0, seconds)) for name, seconds in prediction.time.parts.items()]
    return svg.stacked_bars([("step", pieces, short_time(prediction.time.total))], names, None, "", "s")


def traffic_picture(prediction: Prediction) -> str:
    """One bar of seconds for each kind of message, hidden and exposed."""
    if not prediction.time.traffic:
        return "<p>Nothing is sent.</p>"
    names = (
        "exposed, inside a node",
        "hidden, inside a node",
        "exposed, between nodes",
        "hidden, between nodes",
    )
    bars: list[svg.Bar] = []
    for one in prediction.time.traffic:
        pieces = [
            (f"exposed, {one.group.link}", one.exposed),
            (f"hidden, {one.group.link}", max(0.0, one.hidden)),
        ]
        bars.append((f"{one.axis}: {one.what}", pieces, f"{short_bytes(one.size)}, {short_time(one.time)}"))
    return svg.stacked_bars(bars, names, None, "", "s")


def _schedule(prediction: Prediction) -> str:
    timeline = prediction.time.timeline
    assert timeline is not None
    actions = sum(len(row) for row in timeline.spans)
    bubble = f"<p>bubble {prediction.time.bubble:.1%}</p>"
    if actions > MOST_BARS:
        table = timeline.schedule
        return bubble + (
            f"<p>{actions:,} actions are too many to draw; <code>titan5d schedule --name {escape(table.name)}"
            f" --stages {table.n_ranks} --microbatches {2 * table.n_ranks} --html FILE</code> draws some.</p>"
        )
    return bubble + '<div class="scroll">' + draw.svg([timeline], "s") + "</div>"
