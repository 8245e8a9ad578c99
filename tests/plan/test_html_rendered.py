"""The page in a browser: nothing overlaps or sticks out, and bars have the lengths of their bytes, pixel by pixel."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations, groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.plan.planning import machine_of
from titan5d.config.load import load_config
from titan5d.plan import svg
from titan5d.plan.html import page
from titan5d.plan.plan_run import plan_run
from titan5d.plan.predict import Prediction
from titan5d.plan.rank_memory import LINES, kinds

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed"
)

WIDTHS = (1280, 400)
HEIGHT = 2400
# Where the browser has put everything: [left, top, right, bottom] of texts and bars by picture, of the words, the page
MEASURE = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
const all = (root, what) => [...root.querySelectorAll(what)];
const found = all(document, "svg").map(p => ({ box: box(p),
  texts: all(p, "text").map(t => [t.textContent, ...box(t)]),
  bars: all(p, "rect[height='26']").map(b => [b.textContent, ...box(b)]) }));
const words = all(document.body, "h1, h2, p, pre, .scroll").map(box);
const out = document.createElement("script");
out.type = "application/json"; out.id = "measured";
out.textContent = JSON.stringify({ pictures: found, words: words });
document.body.appendChild(out);
</script>"""


def prediction(config: str, gpus: int, *words: str) -> Prediction:
    return plan_run(load_config(["--config", config, *words]), machine_of("h100-80g", gpus))[0]


CASES = {
    "fsdp": prediction("llama70b", 256),
    "pipeline": prediction("llama405b", 1024, "--training.global_batch_size", "128"),
}


def browse(path: Path, width: int, *action: str) -> str:
    """Runs the browser on a page once and returns what it printed."""
    assert BROWSER is not None
    profile = path.parent / f"profile-{width}"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--user-data-dir={profile}", f"--window-size={width},{HEIGHT}", *action, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def measured(folder: Path, name: str, width: int) -> tuple[Path, dict[str, Any]]:
    """(the page, where the browser has put its parts)."""
    plain, script = folder / f"{name}.html", folder / f"{name}-measured.html"
    text = page(CASES[name], [], [], f"Plan of {name}")
    plain.write_text(text, encoding="utf-8")
    # without a picture to take, a browser's window has a least width; the page does not see more than `width` of it
    narrow = f"<style>html {{ width: {width}px }}</style></head>"
    script.write_text(
        text.replace("</head>", narrow).replace("</body>", MEASURE + "</body>"), encoding="utf-8"
    )
    dom = browse(script, width, "--dump-dom")
    found = re.search(r'id="measured">(.*?)</script>', dom, re.DOTALL)
    assert found is not None
    return plain, json.loads(found[1])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_the_page_as_it_is_seen(name: str, width: int, tmp_path: Path) -> None:
    path, found = measured(tmp_path, name, width)
    for left, _, right, _ in found["words"]:  # pictures stay in frames, which scroll
        assert left >= 0 and right <= width + 0.5
    pictures = found["pictures"]
    assert len(pictures) == (4 if name == "pipeline" else 3)
    for picture in pictures:
        assert_tidy(picture)
    image = screenshot(path, width)
    assert_lengths(image, pictures[0], CASES[name])
    for picture in pictures:
        seen = image.crop(tuple(int(side) for side in clipped(picture["box"], width)))
        colours = seen.getcolors(1 << 24)
        blank = max(count for count, _ in colours) / (seen.width * seen.height)
        assert len(colours) > 10 and blank < 0.99


def clipped(box: list[float], width: int) -> list[float]:
    left, top, right, bottom = box
    return [left, top, min(right, width), min(bottom, HEIGHT)]


def assert_tidy(picture: dict[str, Any]) -> None:
    """Every text and bar inside the picture; no text on another, no bar of a row on the next one."""
    left, top, right, bottom = picture["box"]
    for what, x0, y0, x1, y1 in (*picture["texts"], *picture["bars"]):
        assert left - 0.5 <= x0 and x1 <= right + 0.5 and top - 0.5 <= y0 and y1 <= bottom + 0.5, what
    for one, other in combinations(picture["texts"], 2):
        assert not overlap(one[1:], other[1:]), f"{one[0]!r} lies on {other[0]!r}"
    for one, other in pairwise(sorted(picture["bars"], key=lambda bar: (bar[2], bar[1]))):
        assert other[1] >= one[3] - 0.6 or other[2] >= one[4], f"{one[0]!r} lies on {other[0]!r}"


def overlap(one: list[float], other: list[float]) -> bool:
    """Whether two boxes share more than a hair."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    return across > 1 and down > 2.5  # the box of a text has room above and below its letters


def screenshot(path: Path, width: int) -> Any:
    """What the window shows, as an RGB image."""
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    target = path.with_name(f"{path.stem}-{width}.png")
    browse(path, width, f"--screenshot={target}")
    return pillow.open(target).convert("RGB")


def assert_lengths(image: Any, picture: dict[str, Any], found: Prediction) -> None:
    """Along the middle of each memory bar the colours follow each other, each as long as its bytes."""
    limit = found.machine.device.memory
    scale = (svg.WIDTH - svg.LEFT - svg.RIGHT) / max(limit, *(one.total for one in found.ranks))
    scale *= (picture["box"][2] - picture["box"][0]) / svg.WIDTH  # pixels a byte
    rows = [list(bars) for _, bars in groupby(picture["bars"], key=lambda bar: bar[2])]
    ranks = kinds(found.ranks)
    assert len(rows) == len(ranks)
    for bars, rank in zip(rows, ranks, strict=True):
        middle = round((bars[0][2] + bars[0][4]) / 2)
        seen = [image.getpixel((x, middle)) for x in range(image.width)]
        expected = [name for name in LINES if rank.lines[name] > 0]
        for bar, name in zip(bars, expected, strict=True):
            assert bar[0].startswith(name + ":")
            length = rank.lines[name] * scale
            assert bar[3] - bar[1] == pytest.approx(length, abs=0.2)
            if length < 3 or bar[3] > image.width - 2:
                continue  # too short to count pixels, or behind the edge of the window
            colour = tuple(bytes.fromhex(svg.PALETTE[LINES.index(name) % len(svg.PALETTE)][1:]))
            inside = range(max(0, int(bar[1]) - 3), min(image.width, int(bar[3]) + 4))
            count = sum(all(abs(a - b) < 6 for a, b in zip(seen[x], colour, strict=True)) for x in inside)
            assert count == pytest.approx(length, abs=2), name


def test_a_lie_is_seen(tmp_path: Path) -> None:
    """A bar of another length, a text on another, a picture wider than the page: each of them fails."""
    path, found = measured(tmp_path, "fsdp", 1280)
    memory = found["pictures"][0]
    moved = [[f"{text[0]}, again", *text[1:]] for text in memory["texts"][:1]]
    with pytest.raises(AssertionError, match="lies on"):
        assert_tidy(memory | {"texts": memory["texts"] + moved})
    with pytest.raises(AssertionError):
        assert_tidy(memory | {"box": [*memory["box"][:2], memory["box"][2] / 2, memory["box"][3]]})
    image = screenshot(path, 1280)
    image.paste((255, 255, 255), tuple(int(side) for side in memory["bars"][5][1:]))
    with pytest.raises(AssertionError):
        assert_lengths(image, memory, CASES["fsdp"])
