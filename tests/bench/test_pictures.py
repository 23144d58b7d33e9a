# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.pictures`: the README's pictures from made-up rows, and rows that lack are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from benchmarks import pictures

LENGTHS = (1024, 8192, 16384, 32768, 65536, 131072)
MODELS = {"smollm2": (16384, 32768, 65536), "code-lm": (32000, 65000, 130000)}
TTFT = {
    f"{who}, widened, TTFT, {tokens:,} tokens": value
    for tokens in LENGTHS
    for who, value in (("stock", tokens / 12000), ("default", 1 + tokens / 1e5))
}
CURVE = {
    f"curve, {model}, p {p:g}, {tokens:,} tokens: {quantity}": value
    for model, lengths in MODELS.items()
    for tokens in lengths
    for p in (0.8, 0.9, 0.95, 0.99)
    for quantity, value in (
        ("answers", 0.8 + p / 5), ("perplexity", 1.1 - p / 10), ("density", p / 4), ("speed-up", 3 - p + tokens / 1e5),
    )
}  # fmt: skip


def draw(values: dict[str, float], folder: Path) -> Result:
    rows: list[dict[str, Any]] = [
        {"name": name, "value": value, "unit": "", "bar": None, "better": "higher", "device": "a card", "command": ""}
        for name, value in values.items()
    ]
    (path := folder / "figures.json").write_text(json.dumps(rows))
    app = typer.Typer()
    app.command()(pictures.main)
    return CliRunner().invoke(app, ["--results", str(path), "--folder", str(folder)])


def test_both_are_drawn_small_enough_to_load(tmp_path: Path) -> None:
    assert draw(TTFT | CURVE, tmp_path).exit_code == 0
    for name in ("ttft.png", "curve.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert 5_000 < len(content) <= 60_000


def test_what_is_drawn_is_what_the_rows_say() -> None:
    rows = [{"name": name, "value": value, "device": "x"} for name, value in (TTFT | CURVE).items()]
    ttft = pictures.ttft_of(rows)
    assert list(ttft.stock) == list(LENGTHS)
    assert ttft.ours[32768] == pytest.approx(32768 / 12000 / 1.32768)
    curves = pictures.curves_of(rows)
    assert list(curves) == [(model, tokens) for model in sorted(MODELS) for tokens in MODELS[model]]
    assert curves["smollm2", 16384][1] == pictures.Point(0.9, pytest.approx(2.26384), 0.98, pytest.approx(1.01))


@pytest.mark.parametrize(
    ("lacks", "says", "drawn"),
    [
        ("stock, widened, TTFT, 32,768 tokens", "stock, widened, TTFT, 32,768 tokens", "curve.png"),
        ("default, widened, TTFT, 1,024 tokens", "default, widened, TTFT, 1,024 tokens", "curve.png"),
        ("curve, smollm2, p 0.9, 16,384 tokens: speed-up", "p 0.9, 16,384 tokens: speed-up", "ttft.png"),
        ("curve", "curve, MODEL, p P, N tokens: answers", "ttft.png"),
        ("", "stock, widened, TTFT, N tokens", ""),
    ],
)
def test_rows_that_lack_are_named(lacks: str, says: str, drawn: str, tmp_path: Path) -> None:
    result = draw({name: one for name, one in (TTFT | CURVE).items() if not name.startswith(lacks)}, tmp_path)
    assert result.exit_code == 1
    assert "missing: " in result.output
    assert says in result.output
    assert {path.name for path in tmp_path.glob("*.png")} == {drawn} - {""}
