# SPDX-License-Identifier: Apache-2.0
"""Texts from which prompts are made."""

from pathlib import Path

import pytest

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.prompts.texts import read_prompt_text


def test_texts_are_files_or_folders(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.md").write_text("# b\n")
    (tmp_path / "c.txt").write_text("left out")
    assert sorted(read_prompt_text(tmp_path, 1000).split()) == ["#", "1", "=", "b", "x"]
    assert read_prompt_text(tmp_path / "c.txt", 4) == "left"
    with pytest.raises(ConfigurationError, match="--text"):
        read_prompt_text(tmp_path / "none", 10)
