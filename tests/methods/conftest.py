# SPDX-License-Identifier: Apache-2.0
"""Tests of methods: kernels on the GPU where there is one, else in Triton's interpreter (see the conftest above)."""

import pytest

from tests.methods.cases import DEVICE


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE
