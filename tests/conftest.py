# SPDX-License-Identifier: Apache-2.0
"""Kernels run in Triton's interpreter where there is no CUDA device; tests marked `gpu` are skipped there."""

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # other workers have the other cores
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import save_what_is_thrown_away

    save_what_is_thrown_away()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
