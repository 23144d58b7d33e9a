# SPDX-License-Identifier: Apache-2.0
"""The model that foreign files are for."""

from pathlib import Path

import pytest

from tests.foreign.files import CONFIG
from tests.helpers.folders import model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model", CONFIG)
