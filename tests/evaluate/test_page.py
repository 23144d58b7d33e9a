# SPDX-License-Identifier: Apache-2.0
"""Pages and their drawings: whole by themselves, well-formed, and opened in a browser where there is one."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.charts import curves, heat_map
from benchmarks.page import Page
from vllm_sparse_backend.measure.report import Report

VOID = {"meta", "br"}


class Nesting(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def page() -> Page:
    made = Page("<Tasks> & more", Report("tasks", "a card", command="sparse-prefill eval"))
    made.heading("Table", "a < b")
    made.table(
        {"label": "server", "share": "share"}, [{"label": "<stock>", "share": 0.5}, {"label": "b", "share": None}]
    )
    cells = heat_map(["1,000", "2,000"], ["0 %", "10 %"], [[0.0, 1.0], [None, 0.5]], [["0/4", "4/4"], ["", "2/4"]],
                     x="depth", y="tokens")  # fmt: skip
    lines = curves({"a & b": [(1024, 1.0), (8192, 2.0)], "none": []}, x="tokens", y="perplexity", log_x=True)
    made.figures({"heat": cells, "lines": lines, "empty": ""})
    made.failures(["b, vt: <refused>"])
    return made


def test_a_page_is_whole_by_itself_and_well_formed(page: Page) -> None:
    html = page.html()
    nesting = Nesting()
    nesting.feed(html)
    assert nesting.open == []
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(|<script|<link", html)
    assert "&lt;Tasks&gt; &amp; more" in html
    assert "&lt;stock&gt;" in html
    assert "b, vt: &lt;refused&gt;" in html
    assert html.count("<svg") == 2
    for drawing in re.findall(r"<svg.*?</svg>", html):
        ElementTree.fromstring(drawing)


def test_heat_maps_have_a_cell_for_each_value() -> None:
    drawing = ElementTree.fromstring(
        heat_map(["r"], ["a", "b", "c"], [[0.0, None, 1.0]], [["0", "", "1"]], x="x", y="y")
    )
    cells = [part for part in drawing if part.tag == "rect"]
    assert [cell.get("fill") for cell in cells] == ["#440154", "#fde725"]
    assert [cell[0].text for cell in cells] == ["r, a: 0", "r, c: 1"]


def test_curves_rise_where_values_do_and_stay_inside() -> None:
    drawing = ElementTree.fromstring(curves({"a": [(10, 1.0), (1000, 3.0), (100, 2.0)]}, x="x", y="y", log_x=True))
    places = [(float(part.get("cx", 0)), float(part.get("cy", 0))) for part in drawing if part.tag == "circle"]
    (x1, y1), (x2, y2), (x3, y3) = places
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert y1 > y3
    width, height = float(drawing.get("width", 0)), float(drawing.get("height", 0))
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    assert curves({"a": []}, x="x", y="y") == ""
    assert curves({"flat": [(1, 0.5), (2, 0.5)]}, x="x", y="y").count("<circle") == 2


def browser() -> str | None:
    """A Chromium of the system's, or playwright's."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if found := shutil.which(name):
            return found
    kept = Path.home() / ".cache" / "ms-playwright"
    found = [
        path for name in ("chrome", "headless_shell", "chrome-headless-shell") for path in kept.glob(f"*/*/{name}")
    ]
    return str(found[0]) if found else None


def test_a_browser_draws_it_without_a_network(page: Page, tmp_path: Path) -> None:
    if (found := browser()) is None:
        pytest.skip("no Chromium is installed")
    page.write(tmp_path / "page.html")
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1200,900",
        "--host-resolver-rules=MAP * ^NOTFOUND",
    )
    picture = tmp_path / "page.png"
    command = [found, *options, f"--user-data-dir={tmp_path / 'user'}"]
    address = (tmp_path / "page.html").as_uri()
    dom = subprocess.run(
        [*command, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert dom.count("<rect") == 3
    assert "<h2>Failed, and not counted</h2>" in dom
    subprocess.run([*command, f"--screenshot={picture}", address], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 5000
