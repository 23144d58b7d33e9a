# SPDX-License-Identifier: Apache-2.0
"""The text from which prompts are made."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files in which each line has a unique number."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(8):
        lines = (f"def part_{i}_{n}(x):\n    return x + {n * 7919}\n" for n in range(150))
        (folder / f"{i}.py").write_text("".join(lines))
    return folder
