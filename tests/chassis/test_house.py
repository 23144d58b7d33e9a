# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.house`: what counts as a line of code, and that a bar that is missed is an exit code."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import house
from tests.tools import ROOT

SOURCE = '''\
"""A docstring
of two lines."""

import os  # counts

TEXT = """no docstring,
so both count"""


@cache
def outer(a,
          b):
    """Not this."""
    # Nor this.

    def inner():
        return (a +
                b)

    "a text that stands alone is one too"
    return inner


class Thing:
    """Not this."""
    size = 1
'''


def test_lines_of_code() -> None:
    assert sorted(house.code_lines(SOURCE)) == [4, 6, 7, 10, 11, 12, 16, 17, 18, 21, 24, 26]
    found = [(size.lines, size.where) for size in house.functions(SOURCE, "a.py")]
    assert found == [(7, "a.py:11 outer"), (3, "a.py:16 inner")]
    assert house.code_lines("") == set()


@pytest.mark.parametrize(("seconds", "code"), [(299.0, 0), (301.0, 1)])
def test_a_bar_that_is_missed_is_an_exit_code(
    seconds: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house, "counted", lambda: iter([(house.figure("code, lab", 9, "lines", 10), "2 files")]))
    app = typer.Typer()
    app.command()(house.main)
    path = tmp_path / "house.json"
    path.write_text(json.dumps([house.figure("make test-all", 5, "s", 6), house.figure("gone", 1, "lines")]))
    result = CliRunner().invoke(app, ["--test-seconds", str(seconds), "--json", str(path)])
    assert result.exit_code == code
    figures = {one["name"]: one for one in json.loads(path.read_text())}
    values = {name: one["value"] for name, one in figures.items()}
    assert values == {"code, lab": 9, "make test": seconds, "make test-all": 5}
    assert set(figures["make test"]) == {"name", "value", "unit", "bar", "better", "device", "command"}


@pytest.mark.full
def test_what_is_written_is_of_these_files() -> None:
    """Figures of the repository, whose bars those are that this program holds."""
    written = {one["name"]: one["bar"] for one in json.loads((ROOT / "docs/results/house.json").read_text())}
    own = {one["name"]: one["bar"] for one, _ in house.counted()}
    assert own.items() <= written.items()
