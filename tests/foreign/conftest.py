# SPDX-License-Identifier: Apache-2.0
"""The model that foreign files are for."""

import json
from pathlib import Path

import pytest

from tests.foreign.files import CONFIG


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
