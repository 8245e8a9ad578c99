"""The page is well formed, needs nothing from outside, and draws nothing outside its pictures."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from titan5d.plan import svg
from titan5d.plan.cli import main

SVG = "{http://www.w3.org/2000/svg}"


def pages(folder: Path) -> dict[str, str]:
    cases = {
        "fsdp": ["--config", "llama70b"],
        "over": ["--config", "llama3_8b", "--gpu", "a100-40g"],
        "pipeline": ["--config", "llama405b", "--training.global_batch_size", "128"],
        "search": [
            *("--model", "70B", "--gpus", "64", "--gpu", "h100-80g", "--seq", "8192"),
            *("--global-batch", "64", "--search"),
        ],
    }
    found = {}
    for name, words in cases.items():
        path = folder / f"{name}.html"
        main([*words, "--html", str(path)])
        found[name] = path.read_text(encoding="utf-8")
    return found


def test_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, page in pages(tmp_path).items():
        # as XML, so that a tag left open or a name not escaped is seen
        root = ElementTree.fromstring(page.replace("<!doctype html>", ""))
        pictures = list(root.iter(f"{SVG}svg"))
        assert len(pictures) == (4 if name == "pipeline" else 3), name
        for picture in pictures:
            assert_inside(picture)
        outside = re.sub(r'xmlns="[^"]*"', "", page)
        assert not re.search(r"https?:|<script|<link|<img|url\((?!#)", outside)
        assert "Assumptions" in page and "Memory of a rank" in page
    assert "does NOT fit" in pages(tmp_path)["over"]
    capsys.readouterr()


def assert_inside(picture: ElementTree.Element) -> None:
    """Every bar and every text of the picture lies inside its viewBox."""
    _, _, width, height = (float(number) for number in picture.attrib["viewBox"].split())
    assert (float(picture.attrib["width"]), float(picture.attrib["height"])) == (width, height)
    defined = {id(one) for defs in picture.iter(f"{SVG}defs") for one in defs.iter()}
    for one in picture.iter():
        if id(one) in defined:
            continue
        if one.tag == f"{SVG}rect":
            x, y = float(one.get("x", 0)), float(one.get("y", 0))
            assert x >= 0 and y >= 0
            assert x + float(one.attrib["width"]) <= width + 0.2
            assert y + float(one.attrib["height"]) <= height + 0.2
        if one.tag == f"{SVG}text":
            x, y = float(one.attrib["x"]), float(one.attrib["y"])
            # mixed letters, digits and points of this font at 11 and 12 pixels; texts in the middle reach both ways
            reach = 5.6 * len(one.text or "")
            centred = one.get("class") in ("number", "number dark", "tick")
            assert 0 <= y <= height and x + (reach / 2 if centred else reach) <= width + 2, one.text


def test_bars_are_to_scale_and_long_names_are_cut() -> None:
    bars: list[svg.Bar] = [("a" * 80, [("one", 1.0), ("two", 3.0)], "4 GiB"), ("b", [("one", 8.0)], "x" * 80)]
    root = ElementTree.fromstring(svg.stacked_bars(bars, ("one", "two"), 6.0, "limit", "GiB"))
    assert_inside(root)
    widths = [float(one.attrib["width"]) for one in root.iter(f"{SVG}rect") if one.get("height") == "26"]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01) and widths[2] == pytest.approx(
        8 * widths[0], rel=0.01
    )
    assert any((one.text or "").endswith("…") for one in root.iter(f"{SVG}text"))
