# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/results/arena.jsonl equal the memory that servers of this version reserve, and the table of
docs/operations.md shows them."""

import re
from dataclasses import replace

from benchmarks import arena
from benchmarks.figures import read_figures
from tests.helpers.external_tools import ROOT


def test_the_figures_are_of_this_version():
    stored = [replace(figure, date="") for figure in read_figures(ROOT / arena.RESULTS)]
    assert stored == [replace(figure, date="") for figure in arena.figures()]


def test_the_document_shows_the_figures():
    """A row of the table has the two limits, then the size for each method of the header."""
    cells = [line.strip("| ").split(" | ") for line in (ROOT / "docs/operations.md").read_text().splitlines()]
    start = next(i for i, line in enumerate(cells) if line[0] == "`--max-model-len`")
    methods = [name.strip("`") for name in cells[start][2:]]
    rows = [line for line in cells[start + 2 : start + 20] if re.fullmatch(r"[\d,]+", line[0])]
    shown = {
        f"arena, {method}, requests of {max_len} tokens, steps of {step_tokens}": int(size.replace(",", ""))
        for max_len, step_tokens, *sizes in rows
        for method, size in zip(methods, sizes, strict=True)
    }
    assert shown == {figure.name: figure.value for figure in read_figures(ROOT / arena.RESULTS)}
