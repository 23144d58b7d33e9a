# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.tables`: lists of figures as tables, and bars that are missed."""

import json

import typer
from typer.testing import CliRunner

from benchmarks import tables


def test_tables_and_missed_bars(tmp_path):
    names = ("attend, 8,192 tokens: faster", "attend, 32,768 tokens: faster", "attend, 8,192 tokens: density")
    rows = [
        {"name": name, "value": value, "unit": "ratio", "bar": bar, "better": better, "device": "x", "command": "x"}
        for name, value, bar, better in zip(names, (2.0, 1.0, 0.5), (1.5, 1.5, None), ("higher", "higher", "lower"))
    ]
    (path := tmp_path / "figures.json").write_text(json.dumps(rows))
    app = typer.Typer()
    app.command()(tables.main)
    result = CliRunner().invoke(app, [str(path), "--column", "1"])
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "|  | faster | density |", "| --- | --- | --- |", "| attend, 8,192 tokens | 2 | 0.5 |",
        "| attend, 32,768 tokens | 1 (target: 1.5) |  |", "", "3 figures, 1 miss their targets",
    ]  # fmt: skip
    assert CliRunner().invoke(app, [str(path), "--only", "8,192"]).exit_code == 0
