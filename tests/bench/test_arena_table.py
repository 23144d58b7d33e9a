# SPDX-License-Identifier: Apache-2.0
"""What docs/operations.md says of the arena's size is what a server reserves."""

from pathlib import Path

from benchmarks import arena
from vllm_sparse_backend.measure.report import read_figures

ROOT = Path(__file__).resolve().parents[2]


def test_the_figures_are_of_this_version():
    assert read_figures(ROOT / arena.RESULTS) == list(arena.figures())


def test_the_document_in_the_repository_is_up_to_date():
    between = (ROOT / arena.DOCUMENT).read_text().split("<!-- figures: arena -->")[1].split("<!-- end of figures")[0]
    assert between.strip() == arena.table(ROOT / arena.RESULTS)
