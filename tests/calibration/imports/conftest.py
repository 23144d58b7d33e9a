# SPDX-License-Identifier: Apache-2.0
"""The model of the foreign files."""

from pathlib import Path

import pytest

from tests.helpers.folders import model_folder
from tests.helpers.foreign_files import CONFIG


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model", CONFIG)
