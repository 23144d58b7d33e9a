# SPDX-License-Identifier: Apache-2.0
"""Kernels run in Triton's interpreter where there is no CUDA device; tests marked `gpu` are skipped there.

A run ends with each reason for which tests were skipped, and how many it were.
"""

import os
from collections import Counter

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # other workers have the other cores
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.helpers.triton_interpreter import save_what_is_thrown_away

    save_what_is_thrown_away()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        # Where tests run side by side, those with servers, which take longest, begin first.
        items.sort(key=lambda item: item.get_closest_marker("server") is None)
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, but torch finds none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section("skipped")
    for reason, count in skipped.most_common():
        terminalreporter.write_line(f"{count:5} {reason.removeprefix('Skipped: ')}")
