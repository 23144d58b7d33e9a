# SPDX-License-Identifier: Apache-2.0
"""Kernel tests: on the GPU if there is one, otherwise on the CPU in Triton's interpreter (see tests/conftest.py)."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
