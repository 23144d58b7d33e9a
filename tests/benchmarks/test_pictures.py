# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.pictures`: pictures from invented rows, and the names of missing rows."""

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
SETTINGS = {"p 0.8 most 1": 2.1, "p 0.9 most 0.2": 2.2, "p 0.95 most 1": 1.5}
CURVE = {f"curve, {setting}: speed-up": value for setting, value in SETTINGS.items()} | {
    f"curve, {setting}, {model}, {tokens:,} tokens: {quantity}": value
    for model, lengths in MODELS.items()
    for tokens in lengths
    for setting, speed_up in SETTINGS.items()
    for quantity, value in (("answers", 1 - speed_up / 100), ("perplexity", 1 + tokens / 1e7), ("density", 0.1))
}


def draw(values: dict[str, float], folder: Path) -> Result:
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    rows: list[dict[str, Any]] = [
        {"name": name, "value": value, "unit": "", "bar": None, "better": "higher", "device": "a card", "command": ""}
        for name, value in values.items()
    ]
    (path := folder / "figures.json").write_text(json.dumps(rows))
    app = typer.Typer()
    app.command()(pictures.main)
    return CliRunner().invoke(app, ["--ttft", str(path), "--curves", str(path), "--folder", str(folder)])


@pytest.mark.full
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
    assert ttft.speed_ups[32768] == 1.32768
    assert pictures.two_decimals(1.095) == "1.10", "as in README.md's table"
    dense = [dict(row, name=row["name"].replace("8,192", "6,144"), value=9.0) for row in rows if "8,192" in row["name"]]
    assert pictures.ttft_of(rows + dense) == ttft, "lengths close to the next longer one are left out"
    curves = pictures.curves_of(rows)
    assert list(curves) == [("code-lm", 130000), ("smollm2", 65536)]
    assert [point.setting for point in curves["smollm2", 65536]] == ["p 0.95 most 1", "p 0.8 most 1", "p 0.9 most 0.2"]
    assert curves["smollm2", 65536][1][1:] == pytest.approx((2.1, 0.979, 1.0065536))


@pytest.mark.full
@pytest.mark.parametrize(
    ("missing", "says", "drawn"),
    [
        ("stock, widened, TTFT, 32,768 tokens", "stock, widened, TTFT, 32,768 tokens", "curve.png"),
        (
            "curve, p 0.9 most 0.2, smollm2, 65,536",
            "curve, p 0.9 most 0.2, smollm2, 65,536 tokens: answers",
            "ttft.png",
        ),
        ("curve", "curve, SETTING: speed-up", "ttft.png"),
        ("", "stock, widened, TTFT, N tokens", ""),
    ],
)
def test_missing_rows_are_named(missing: str, says: str, drawn: str, tmp_path: Path) -> None:
    result = draw({name: value for name, value in (TTFT | CURVE).items() if not name.startswith(missing)}, tmp_path)
    assert result.exit_code == 1
    assert "missing: " in result.output
    assert says in result.output
    assert {path.name for path in tmp_path.glob("*.png")} == {drawn} - {""}
