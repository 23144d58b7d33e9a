# SPDX-License-Identifier: Apache-2.0
"""Files that users name."""

from pathlib import Path

import pytest

from vllm_sparse_backend.config import input_files
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.profile import load_profile
from vllm_sparse_backend.prompts.texts import read_prompt_text


def test_line_ends_of_texts_are_newlines(tmp_path: Path) -> None:
    """Equal texts make equal prompts, whatever line ends a checkout has."""
    (path := tmp_path / "text.py").write_bytes(b"a\r\nb\rc\n")
    assert read_prompt_text(path) == input_files.read_text(path) == "a\nb\nc\n"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"^{tmp_path}: cannot be read: Is a directory"):
        load_profile(tmp_path)


@pytest.mark.parametrize("name", ["~nobody/x.yaml", "a\0b", "format: 1\n" * 100])
def test_a_name_that_no_file_can_have_is_no_file(name: str) -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        load_profile(name)
