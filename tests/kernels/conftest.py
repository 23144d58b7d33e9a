# SPDX-License-Identifier: Apache-2.0
"""Kernel tests: on the GPU where there is one, else on the CPU in Triton's interpreter (see the conftest above)."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
