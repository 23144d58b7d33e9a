# SPDX-License-Identifier: Apache-2.0
"""Files that users name."""

import os
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


def test_a_folder_and_a_fifo_are_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo):
        with pytest.raises(ConfigurationError, match=f"^{path}: given a folder, a fifo or a device, expected a file"):
            load_profile(path)


@pytest.mark.parametrize("name", ["~nobody/x.yaml", "a\0b", "format: 1\n" * 100])
def test_a_name_that_no_file_can_have_is_no_file(name: str) -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        load_profile(name)
