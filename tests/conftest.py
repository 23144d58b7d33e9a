# SPDX-License-Identifier: Apache-2.0
"""Kernels run in Triton's interpreter if there is no CUDA device, and tests marked `gpu` are skipped.

With ``--dist loadfile``, a process runs entire files, so fixtures and caches of a module exist once. Files whose tests
use the fixture ``servers`` stay together, so these servers start once. At the end of a run, each reason for skipped
tests is printed with the number of tests.

Random searches by hypothesis draw the same cases in every run, and have no time limits, so that a result depends on
neither chance nor the machine's load. ``--hypothesis-profile=random`` draws other cases.
"""

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Before anything imports numpy, which multiplies matrices in Triton's interpreter. They are small: with two busy
# processes on two cores, threads wait for each other for 16 ms where a single thread computes for 0.05 ms.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from hypothesis import HealthCheck, settings

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # other workers use the other cores
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.helpers.triton_interpreter import save_what_is_thrown_away, sum_float32_products_in_float64

    save_what_is_thrown_away()
    sum_float32_products_in_float64()


settings.register_profile("random", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile("same")

ROOT = Path(__file__).parents[1]
SHARES_SERVERS = re.compile(r"\bservers: Servers\b")
"""Matches the source of a test module whose tests use the fixture ``servers``."""


@cache
def file_group(path: str) -> str:
    """Return the group of a file: all files of a group run in the same process. It is the path itself, or "servers"."""
    with_servers = path.startswith("tests/server/") and SHARES_SERVERS.search((ROOT / path).read_text())
    return "servers" if with_servers else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FileGroups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return file_group(super()._split_scope(nodeid))

    return FileGroups(config, log)


def start_order(item: pytest.Item) -> int:
    """Return the position of a test in a parallel run: the slowest tests start first, servers before kernels."""
    if item.get_closest_marker("server"):
        return 0
    return 1 if item.path.is_relative_to(ROOT / "tests/kernels") else 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=start_order)
    if HAS_CUDA:
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
