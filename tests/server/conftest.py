# SPDX-License-Identifier: Apache-2.0
"""One small model for all servers, and each server's answers taken once: starting one costs half a minute or more."""

from pathlib import Path

import pytest

from vllm_sparse_backend.demo.model import make_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small")
