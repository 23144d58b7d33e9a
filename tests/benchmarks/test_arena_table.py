# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/results/arena.json equal the memory that servers of this version reserve."""

from benchmarks import arena
from benchmarks.figures import read_figures
from tests.helpers.external_tools import ROOT


def test_the_figures_are_of_this_version():
    assert read_figures(ROOT / arena.RESULTS) == list(arena.figures())
