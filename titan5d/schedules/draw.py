"""A schedule's timeline as a picture: Gantt charts in SVG, several below each other to one time scale, and a
page of HTML around them that needs nothing from the network.

Colour says the kind of action (F, B, I, W), the shade which of its rank's stages it works on (darkest = the
lowest), the number which micro-batch; hatched = the rank waits. An OVERLAP_F_B slot shows its forward above
its backward. Simulated and measured timelines are drawn alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from titan5d.schedules.memory import peak_kept_weight_grads, peak_microbatches
from titan5d.schedules.table import KIND_NAMES, Action, Kind, parts
from titan5d.schedules.timeline import Span, Timeline

COLOURS: dict[Kind, tuple[int, int, int]] = {
    "F": (52, 104, 176),  # blue
    "B": (38, 132, 104),  # green
    "I": (186, 70, 118),  # rose
    "W": (222, 150, 40),  # amber
}

_LEFT = 74  # room for "rank 12"
_RIGHT = 250  # room for the figures of a rank
_ROW = 24
_ROW_STEP = 28
_TITLE = 44
_AXIS = 26
_PANEL_GAP = 22
_LEGEND = 34
_CHARACTER = 6.4  # width of a digit at font size 11

_STYLE = """
text { font: 11px "DejaVu Sans", Verdana, Arial, sans-serif; fill: #222 }
.name { font-size: 15px; font-weight: bold }
.note { fill: #555 }
.number { text-anchor: middle; pointer-events: none }
.dark { fill: #fff }
.tick { text-anchor: middle; fill: #666; font-size: 10px }
.line { stroke: #bbb; stroke-width: 1 }
.bar { stroke: #fff; stroke-width: 0.7 }
"""


def svg(timelines: Sequence[Timeline], unit: str = "", max_width: float = 1800) -> str:
    """One SVG picture of all timelines, below each other and to one scale.

    Args:
        timelines: at least one.
        unit: what the times are in ("ms"); written at the axes.
        max_width: of the bars, in pixels. Numbers that do not fit into their bars are left out.
    """
    scale = _pixels_per_time(timelines, max_width)
    width = _LEFT + max(timeline.makespan for timeline in timelines) * scale + _RIGHT
    body = _legend(timelines, y=8)
    y: float = _LEGEND
    for timeline in timelines:
        panel = _Panel(timeline, scale, unit, top=y)
        body += panel.draw()
        y += panel.height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" '
            f'viewBox="0 0 {width:.0f} {y:.0f}">',
            f"<style>{_STYLE}</style>",
            '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f6f6f6"/>'
            '<line x1="0" y1="0" x2="0" y2="6" stroke="#c4c4c4" stroke-width="2"/></pattern></defs>',
            f'<rect width="{width:.0f}" height="{y:.0f}" fill="#fff"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def html(timelines: Sequence[Timeline], title: str, unit: str = "") -> str:
    """A self-contained page: a table that compares the schedules, and their picture."""
    head = "schedule, ranks, stages, micro-batches, makespan, bubble, idle by rank, holds by rank, W put off"
    rows = []
    for timeline in timelines:
        schedule = timeline.schedule
        cells = (
            schedule.name,
            schedule.n_ranks,
            schedule.n_stages,
            schedule.microbatches,
            _with_unit(timeline.makespan, unit),
            f"{timeline.bubble_fraction:.1%}",
            " ".join(f"{idle:.4g}" for idle in timeline.idle),
            " ".join(f"{held:.4g}" for held in peak_microbatches(schedule)),
            " ".join(str(peak) for peak in peak_kept_weight_grads(schedule)),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{escape(title)}</title>
<style>
body {{ font: 14px "DejaVu Sans", Verdana, Arial, sans-serif; margin: 24px; color: #222; background: #fff }}
table {{ border-collapse: collapse; margin-bottom: 16px }}
td, th {{ border-bottom: 1px solid #ddd; padding: 4px 12px 4px 0; text-align: left }}
.scroll {{ overflow-x: auto }}
p {{ max-width: 60em }}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
<table>
<tr>{"".join(f"<th>{name}</th>" for name in head.split(", "))}</tr>
{chr(10).join(rows)}
</table>
<p>Holds: the most micro-batches whose activations a rank keeps at once; one that is held for one of two
stages counts a half. W put off: the most weight gradients a rank has put off at once, each of one stage.
Values by rank start with rank 0. Point at a bar to see its times.</p>
<div class="scroll">
{svg(timelines, unit, max_width=6000)}</div>
</body>
</html>
"""


@dataclass(frozen=True)
class _Panel:
    """One timeline on the page: its title, one line of bars per rank, its time axis. `top` is its upper edge,
    `scale` the pixels per unit of time."""

    timeline: Timeline
    scale: float
    unit: str
    top: float

    @property
    def height(self) -> float:
        return _TITLE + _ROW_STEP * len(self.timeline.spans) + _AXIS + _PANEL_GAP

    def x(self, time: float) -> float:
        return _LEFT + (time - self.timeline.start) * self.scale

    def draw(self) -> list[str]:
        out = self._title()
        held = peak_microbatches(self.timeline.schedule)
        right = self.x(self.timeline.end)
        for rank, (row, idle) in enumerate(zip(self.timeline.spans, self.timeline.idle, strict=True)):
            y = self.top + _TITLE + rank * _ROW_STEP
            out.append(_text(8, y + 16, f"rank {rank}"))
            # The whole line is hatched first; what the bars leave free is the bubble.
            out.append(
                f'<rect x="{_LEFT}" y="{y:.1f}" width="{right - _LEFT:.1f}" height="{_ROW}" '
                'fill="url(#bubble)"/>'
            )
            for span in row:
                actions = parts(span.slot)
                for index, action in enumerate(actions):
                    height = _ROW / len(actions)
                    out += self._bar(action, span, y + index * height, height)
            share = idle / self.timeline.makespan if self.timeline.makespan > 0 else 0.0
            note = f"idle {idle:.4g} ({share:.1%}), holds {held[rank]:.4g} micro-batches"
            out.append(_text(right + 10, y + 16, note, "note"))
        return out + self._axis()

    def _title(self) -> list[str]:
        schedule = self.timeline.schedule
        makespan = _with_unit(self.timeline.makespan, self.unit)
        figures = (
            f"{schedule.n_ranks} ranks, {schedule.n_stages} stages, {schedule.microbatches} micro-batches: "
            f"makespan {makespan}, bubble {self.timeline.bubble_fraction:.1%}"
        )
        return [
            _text(_LEFT, self.top + 16, schedule.name, "name"),
            _text(_LEFT, self.top + 33, figures, "note"),
        ]

    def _bar(self, action: Action, span: Span, y: float, height: float) -> list[str]:
        schedule = self.timeline.schedule
        fill, is_dark = _shade(action.kind, schedule.chunk_of_stage[action.stage], schedule.most_chunks)
        width = (span.end - span.start) * self.scale
        start, end = span.start - self.timeline.start, span.end - self.timeline.start
        what = (
            f"{action}: stage {action.stage}, {KIND_NAMES[action.kind]} of micro-batch {action.microbatch}, "
            f"{start:.4g} to {_with_unit(end, self.unit)}"
        )
        out = [
            f'<rect class="bar" x="{self.x(span.start):.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:g}" fill="{fill}"><title>{what}</title></rect>'
        ]
        if width >= _CHARACTER * len(str(action.microbatch)) + 2:
            style = "number dark" if is_dark else "number"
            middle = self.x(span.start) + width / 2
            out.append(_text(middle, y + height / 2 + 4, str(action.microbatch), style))
        return out

    def _axis(self) -> list[str]:
        """A line with round times, at least 70 pixels apart."""
        timeline = self.timeline
        if timeline.makespan <= 0:
            return []
        y = self.top + _TITLE + _ROW_STEP * len(timeline.spans)
        rough = 70 / self.scale
        magnitude = 10.0 ** floor(log10(rough))
        step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough * 0.999)
        out = [f'<line class="line" x1="{_LEFT}" y1="{y:.1f}" x2="{self.x(timeline.end):.1f}" y2="{y:.1f}"/>']
        for tick in range(floor(timeline.makespan / step + 1e-9) + 1):
            x = _LEFT + tick * step * self.scale
            out.append(f'<line class="line" x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 4:.1f}"/>')
            out.append(_text(x, y + 15, _with_unit(tick * step, self.unit), "tick"))
        return out


def _shade(kind: Kind, chunk: int, n_chunks: int) -> tuple[str, bool]:
    """A bar's colour, and whether it is dark enough for white numbers. Later chunks are mixed with white."""
    white = 0.0 if n_chunks == 1 else 0.6 * chunk / (n_chunks - 1)
    red, green, blue = (round(value + (255 - value) * white) for value in COLOURS[kind])
    return f"#{red:02x}{green:02x}{blue:02x}", 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _legend(timelines: Sequence[Timeline], y: float) -> list[str]:
    """The kinds that occur, the shades if there are several chunks, and the bubble."""
    kinds = {
        action.kind
        for schedule in (timeline.schedule for timeline in timelines)
        for rank in range(schedule.n_ranks)
        for action in schedule.actions(rank)
    }
    entries = [
        (_shade(kind, 0, 1)[0], f"{kind} {name}") for kind, name in KIND_NAMES.items() if kind in kinds
    ]
    entries.append(("url(#bubble)", "bubble (idle)"))
    out = []
    x: float = _LEFT
    for fill, name in entries:
        out.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="16" height="14" fill="{fill}" stroke="#999"/>')
        out.append(_text(x + 22, y + 11, name))
        x += 42 + 7 * len(name)
    if any(timeline.schedule.n_stages > timeline.schedule.n_ranks for timeline in timelines):
        out.append(_text(x, y + 11, "lighter shade: a later stage of the same rank", "note"))
    return out


def _pixels_per_time(timelines: Sequence[Timeline], max_width: float) -> float:
    """Wide enough for the number in the shortest bar; the longest row takes 900 pixels to `max_width`."""
    longest = max(timeline.makespan for timeline in timelines)
    if longest <= 0:
        return 1.0
    wanted = max(
        (
            (_CHARACTER * len(str(action.microbatch)) + 4) / (span.end - span.start)
            for timeline in timelines
            for row in timeline.spans
            for span in row
            if span.end > span.start
            for action in parts(span.slot)
        ),
        default=0.0,
    )
    return min(max(wanted, 900 / longest), max_width / longest)


def _with_unit(time: float, unit: str) -> str:
    return f"{time:.4g} {unit}" if unit else f"{time:.4g}"


def _text(x: float, y: float, text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
