"""The picture is read back: every bar is where its time says, in its colour, with its number."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from titan5d.schedules import catalog, draw
from titan5d.schedules.simulate import StageTimes, simulate
from titan5d.schedules.table import parts
from titan5d.schedules.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def of(name: str, p: int = 4, m: int = 8) -> Timeline:
    schedule = catalog.build(name, p, catalog.default_chunks(name), m)
    return simulate(schedule, StageTimes.even(schedule, 1, 1, 1))


def bars(picture: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(picture)
    return [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "bar"]


@pytest.mark.parametrize("name", catalog.NAMES)
def test_every_action_is_one_bar_to_scale(name: str) -> None:
    timeline = of(name)
    drawn = {}
    for bar in bars(draw.svg([timeline])):
        title = bar.find(f"{SVG}title")
        assert title is not None and title.text is not None
        drawn[title.text.split(":")[0]] = bar
    wanted = {str(action): span for row in timeline.spans for span in row for action in parts(span.slot)}
    assert drawn.keys() == wanted.keys()
    scale = max(float(bar.get("x", 0)) + float(bar.get("width", 0)) - 74 for bar in drawn.values())
    scale /= timeline.makespan
    for text, bar in drawn.items():
        span = wanted[text]
        assert float(bar.get("x", 0)) - 74 == pytest.approx(span.start * scale, abs=0.2)
        assert float(bar.get("width", 0)) == pytest.approx((span.end - span.start) * scale, abs=0.2)


def test_colours_shades_and_halves() -> None:
    fills: dict[str, set[str]] = {}
    heights = set()
    for bar in bars(draw.svg([of("DualPipeV")])):
        title = bar.find(f"{SVG}title")
        assert title is not None and title.text is not None
        match = re.match(r"(\d+)([FBIW])", title.text)
        assert match is not None
        later = int(match[1]) >= 4
        fills.setdefault(match[2] + ("'" if later else ""), set()).add(bar.get("fill", ""))
        heights.add(bar.get("height"))
    assert len(fills) == 8  # four kinds in two shades
    assert all(len(colours) == 1 for colours in fills.values())
    assert len(set.union(*fills.values())) == 8
    assert heights == {"24", "12"}


def test_hatched_lines_numbers_and_figures() -> None:
    picture = draw.svg([of("1F1B")])
    root = ElementTree.fromstring(picture)
    hatched = [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") == "url(#bubble)"]
    assert len(hatched) == 4 + 1  # a line per rank, and the legend
    numbers = [
        str(text.text) for text in root.iter(f"{SVG}text") if (text.get("class") or "").startswith("number")
    ]
    assert sorted(numbers) == sorted(str(m) for m in range(8) for _ in range(2 * 4))
    assert "makespan 33, bubble 27.3%" in picture
    assert "idle 9 (27.3%), holds 3 micro-batches" in picture


def test_several_on_one_page_have_one_scale() -> None:
    timelines = [of("GPipe"), of("ZBVZeroBubble")]
    right = [
        max(float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in part) - 74
        for part in (bars(draw.svg(timelines))[: 4 * 16], bars(draw.svg(timelines))[4 * 16 :])
    ]
    assert right[0] / right[1] == pytest.approx(33 / 25.5, rel=1e-3)
    page = draw.html(timelines, "A & B", unit="ms")
    assert page.count("<svg ") == 1
    assert "<td>GPipe</td>" in page and "<td>25.5 ms</td>" in page
    assert "<h1>A &amp; B</h1>" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing from the network


def test_a_measured_timeline_starts_at_its_first_action() -> None:
    simulated = of("1F1B", p=2, m=2)
    later = tuple(tuple(Span(s.slot, s.start + 1000, s.end + 1000) for s in row) for row in simulated.spans)
    measured = replace(simulated, spans=later)
    assert draw.svg([measured]) == draw.svg([simulated])
    assert measured.bubble_fraction == pytest.approx(simulated.bubble_fraction)


def test_names_are_escaped() -> None:
    timeline = of("1F1B", p=1, m=1)
    named = replace(timeline, schedule=replace(timeline.schedule, name="<b>&x.csv"))
    ElementTree.fromstring(draw.svg([named]))
    assert "&lt;b&gt;&amp;x.csv" in draw.html([named], "t")


def test_no_time_at_all() -> None:
    schedule = catalog.build("GPipe", 2, 1, 1)
    ElementTree.fromstring(draw.svg([simulate(schedule, StageTimes.even(schedule, 0, 0, 0))]))
