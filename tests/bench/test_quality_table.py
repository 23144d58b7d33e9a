# SPDX-License-Identifier: Apache-2.0
"""The table of what settings lose beside how fast they are: from results of servers and of benchmarks."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import quality
from vllm_sparse_backend.settings.methods import PRESETS, make_method

ROOT = Path(__file__).parents[2]


def figure(name: str, value: float, device: str = "a card") -> dict[str, object]:
    about = {"unit": "share", "bar": None, "better": "higher", "device": device, "command": "x"}
    return {"name": name, "value": value, **about}


def asked(label: str, right: float, perplexity: float, tokens: str = "12,000", device: str = "a card"):
    name = f"{label}, answers inside the prompt, {tokens} tokens, code-lm-29m-128k"
    return [figure(f"{name}: right", right, device), figure(f"{name}: perplexity", perplexity, device)]


def timed(label: str, times: float, density: float, after: str = "122,880"):
    name = f"whole method, {label}, code-lm-29m-128k, after {after}"
    return [figure(f"{name}: times faster", times), figure(f"{name}: density", density)]


@pytest.mark.parametrize(
    ("label", "same"),
    [
        ("sale", "sale"),
        ("no configuration", "no configuration"),
        ('flex estimating="spread" last_queries=256', "flex last_queries=256 estimating=spread"),
        ("anchor theta=3.0 whole_blocks=true", "anchor whole_blocks=true theta=3"),
    ],
)
def test_labels_that_mean_the_same_are_the_same(label, same):
    assert quality.plain(label) == quality.plain(same)


def test_the_default_is_held_to_its_bars_and_stands_out(tmp_path):
    default = quality.default_label()
    method, params = PRESETS["default"]
    assert make_method("default", {}) == make_method(method, params)
    answers = [*asked("stock", 0.8, 4.0), *asked("b c=2.0", 0.4, 5.0), *asked(default, 0.72, 4.02)]
    answers += asked("stock", 0.9, 4.0, "8,192", "another card") + asked("b", 0.9, 4.0, "8,192")
    performance = [*timed("b c=2", 9.0, 0.05), *timed(default, 3.0, 0.1)]
    paths = {name: tmp_path / f"{name}.json" for name in ("answers", "performance", "results")}
    paths["answers"].write_text(json.dumps(answers))
    paths["performance"].write_text(json.dumps(performance))
    document = tmp_path / "quality.md"
    document.write_text("<!-- figures: answers -->\nold\n<!-- end of figures -->\n")
    app = typer.Typer()
    app.command()(quality.main)
    options = [str(x) for name, path in paths.items() for x in (f"--{name}", path)]
    result = CliRunner().invoke(app, [*options, "--markdown", str(document)], catch_exceptions=False)
    assert result.exit_code == 0, result.output

    figures = {row["name"]: row for row in json.loads(paths["results"].read_text())}
    held = figures[f"{default}, 12,000 tokens, code-lm-29m-128k: right answers ÷ stock's"]
    assert (held["value"], held["bar"]) == (0.9, 0.98)
    assert figures[f"{default}, 12,000 tokens, code-lm-29m-128k: perplexity ÷ stock's"]["value"] == 1.005
    assert figures[f"whole method, {default}, code-lm-29m-128k, after 122,880: times faster"]["bar"] == 2.5
    assert "right answers" in result.output  # 0.9 is less than 0.98
    assert not any(name.startswith("b, 8,192") for name in figures)  # stock was asked on another card

    rows = document.read_text().splitlines()
    assert "|  | 8,192 tokens | 12,000 tokens | after 24,576 | after 122,880 |" in rows
    first, second = (
        f"| **{default}** |  | 0.90, 1.005 |  | 3.0× (0.10) |",
        "| b c=2 |  | 0.50, 1.250 |  | 9.0× (0.05) |",
    )
    assert rows.index(first) < rows.index(second)


def test_the_document_in_the_repository_is_up_to_date():
    asked = quality.by_plain_label(quality.load(ROOT / "docs/results/answers.json"), quality.NAMED)
    timed = quality.by_plain_label(quality.load(ROOT / "docs/results/performance.json"), quality.TIMED)
    text = (ROOT / "docs/quality.md").read_text()
    assert quality.table(asked, timed) in text
    held = {row["name"]: row for row in quality.load(ROOT / "docs/results/quality.json").values()}
    for row in quality.figures_of(asked, timed):
        assert held[row["name"]]["value"] == row["value"]
