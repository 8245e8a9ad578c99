"""The report as one page of HTML that needs nothing from the network: a coloured cell for each layout and check.

Green is equal, the paler the nearer to the tolerance on a scale of powers of ten; red is over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from titan5d.verify.compare import Check, Outcome
from titan5d.verify.report import Table, explained, verdict, worst_parameter
from titan5d.verify.run import Row
from titan5d.verify.shrink import Small

_STYLE = """
body { font: 14px/1.45 "DejaVu Sans", Verdana, Arial, sans-serif; color: #222; margin: 24px; max-width: 1200px }
table { border-collapse: collapse }
th, td { padding: 4px 9px; border: 1px solid #ddd; text-align: right; white-space: nowrap }
th { background: #f4f4f4 }
td.name, td.text { text-align: left }
td.text { white-space: normal; color: #555 }
.bad { background: #f4b4ae }
.verdict { font-size: 16px; font-weight: bold }
li { color: #444 }
"""


def page(name: str, small: Small, expected: Outcome, rows: Sequence[Row]) -> str:
    """The whole page."""
    columns = Table(small.layouts, expected, small.config.compile.enable).columns
    head = "".join(
        f"<th>{escape(word)}</th>" for word in ("layout", "ranks", *columns, "seconds", "worst parameter")
    )
    body = "\n".join(_row(row, columns) for row in rows)
    notes = "".join(f"<li>{escape(note)}</li>" for note in small.notes)
    losses = ", ".join(f"{line['loss']:.6f}" for line in expected.metrics)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>titan5d verify: {escape(name)}</title>
<style>{_STYLE}</style></head><body>
<h1>titan5d verify: {escape(name)}</h1>
<p class="verdict">{escape(verdict(rows))}</p>
<p>A small case of the same kind, in fp32 on CPU ranks, against one process (loss {losses}). Numbers are the largest
relative error of all ranks and steps; point at one to see where it occurred.</p>
<table><tr>{head}</tr>
{body}
</table>
<h2>What was made small</h2><ul>{notes}</ul>
</body></html>
"""


def _row(row: Row, columns: Sequence[str]) -> str:
    start = f'<tr><td class="name">{row.cuts}</td><td>{row.cuts.topology.world_size}</td>'
    if row.status in ("refused", "failed"):
        bad = " bad" if row.status == "failed" else ""
        text = f"{row.status}: {row.message}"
        return f'{start}<td class="text{bad}" colspan="{len(columns) + 2}">{escape(text)}</td></tr>'
    cells = "".join(_cell(row.checks[name]) if name in row.checks else "<td></td>" for name in columns)
    where = "; ".join(explained(check) for check in row.checks.values() if not check.ok) or worst_parameter(
        row
    )
    return f'{start}{cells}<td>{row.seconds:.1f}</td><td class="text">{escape(where)}</td></tr>'


def _cell(check: Check) -> str:
    where = escape(check.where, quote=True)
    if not check.ok:
        return f'<td class="bad" title="{where}">{check.error:.1e}</td>'
    # tenfold below the tolerance: one step greener, up to four
    room = math.log10(check.tolerance / check.error) if check.error > 0 and check.tolerance > 0 else 4.0
    green = round(96 - 9 * min(max(room, 0.0), 4.0) / 2)
    return f'<td style="background: hsl(140, 45%, {green}%)" title="{where}">{check.error:.1e}</td>'
