"""Small pictures without a library: stacked bars against a limit, side by side. Text stays inside the picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

PALETTE = (
    "#34689f",
    "#6a9bd1",
    "#268468",
    "#7fc3ab",
    "#b9a13a",
    "#ba4676",
    "#dd8fb0",
    "#8a63b5",
    "#b79ad6",
    "#5f7d8c",
    "#c98a4b",
    "#9a9a9a",
    "#cfcfcf",
    "#444444",
)
WIDTH = 960
LEFT = 290
RIGHT = 150
_CHARACTER = 6.7  # width of a letter at font size 12, at most
_STYLE = (
    'text { font: 12px "DejaVu Sans", Verdana, Arial, sans-serif; fill: #222 } .note { fill: #555 }'
    " .limit { stroke: #c0262d; stroke-width: 2; stroke-dasharray: 5 3 } .axis { stroke: #bbb }"
)

Bar = tuple[str, Sequence[tuple[str, float]], str]
"""(what stands before it, its pieces by name, what stands behind it)."""


def stacked_bars(
    bars: Sequence[Bar], names: Sequence[str], limit: float | None, limit_text: str, unit: str
) -> str:
    """Horizontal bars of pieces, one colour a name, and a line where the limit is.

    Args:
        names: of all pieces, in the order of the colours.
        limit: None = there is none. unit: of the values, written at the pieces' titles.
    """
    longest = max([sum(value for _, value in pieces) for _, pieces, _ in bars] + [limit or 0.0] + [1e-12])
    scale = (WIDTH - LEFT - RIGHT) / longest
    shown = [
        name for name in names if any(value > 0 for _, pieces, _ in bars for n, value in pieces if n == name)
    ]
    body, y = _legend(shown, names)
    top = y
    for before, pieces, after in bars:
        body.append(_text(8, y + 18, _cut(before, LEFT - 16)))
        x = float(LEFT)
        for name, value in pieces:
            if value <= 0:
                continue
            width = value * scale
            body.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="26" fill="{_colour(name, names)}">'
                f"<title>{escape(f'{name}: {value:.3g} {unit}')}</title></rect>"
            )
            x += width
        body.append(_text(min(x + 6, WIDTH - RIGHT + 6), y + 18, _cut(after, RIGHT - 14), "note"))
        y += 34
    if limit is not None:
        x = LEFT + limit * scale
        body.append(f'<line class="limit" x1="{x:.1f}" y1="{top - 6:.1f}" x2="{x:.1f}" y2="{y:.1f}"/>')
        half = len(limit_text) * _CHARACTER / 2
        middle = min(max(x, half + 4), WIDTH - half - 4)
        body.append(_text(middle - half, y + 16, limit_text))
        y += 24
    return _picture(body, y + 8)


def _legend(shown: Sequence[str], names: Sequence[str]) -> tuple[list[str], float]:
    """Squares and names in as many lines as it takes, and where the picture goes on below them."""
    out: list[str] = []
    x, y = 8.0, 8.0
    for name in shown:
        width = 34 + len(name) * _CHARACTER
        if x + width > WIDTH - 8:
            x, y = 8.0, y + 20
        out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" fill="{_colour(name, names)}"/>')
        out.append(_text(x + 18, y + 11, name))
        x += width
    return out, y + 30


def _colour(name: str, names: Sequence[str]) -> str:
    return PALETTE[list(names).index(name) % len(PALETTE)]


def _cut(text: str, width: float) -> str:
    most = int(width / _CHARACTER)
    return text if len(text) <= most else text[: most - 1] + "…"


def _picture(body: Sequence[str], height: float) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}"'
            f' viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>',
            *body,
            "</svg>",
        ]
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
