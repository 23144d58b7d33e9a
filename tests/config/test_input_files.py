# SPDX-License-Identifier: Apache-2.0
"""Files that users name: fifos and devices are refused without waiting, and so are files that are too large."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.folders import model_folder
from tests.helpers.foreign_files import CONFIG
from vllm_sparse_backend.calibration import prompts
from vllm_sparse_backend.calibration.imports import import_profile
from vllm_sparse_backend.config import input_files
from vllm_sparse_backend.config.crossover_table import load_crossover
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import load_profile
from vllm_sparse_backend.evaluation.compared_servers import resume
from vllm_sparse_backend.evaluation.report import BenchError, Report
from vllm_sparse_backend.prompts.texts import read_prompt_text

READERS: dict[str, Callable[[Path, Path], Any]] = {
    "a profile": lambda path, model: load_profile(path),
    "a table of crossovers": lambda path, model: load_crossover(str(path)),
    "profile import": import_profile,
    "a model's config": lambda path, model: ModelShape.from_folder(path),
    "calibration prompts": lambda path, model: prompts.read_prompts(model, [path], 10),
    "a text": lambda path, model: read_prompt_text(path),
    "answers that eval continues": lambda path, model: resume(
        Report("answers", "", path), {}, [SimpleNamespace(model="", label="a", what="")]
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_only_regular_files_of_some_size_are_read(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "load_tokenizer", lambda model: None)
    monkeypatch.setattr(prompts, "begin_ids", lambda tokenizer: [])
    model = model_folder(tmp_path / "model", CONFIG)
    os.mkfifo(fifo := tmp_path / "fifo")
    with (large := tmp_path / "large").open("wb") as file:
        file.truncate(input_files.MAX_DATA_BYTES + 1)
    for path, problem in (
        (fifo, "given a fifo, expected a file"),
        (Path("/dev/zero"), "given a device, expected a file"),
        (large, "given more than"),
    ):
        with pytest.raises((ConfigurationError, BenchError), match=f"{path}: .*{problem}"):
            READERS[reader](path, model)


def test_line_ends_of_texts_are_newlines(tmp_path: Path) -> None:
    """Equal texts make equal prompts, whatever line ends a checkout has."""
    (path := tmp_path / "text.py").write_bytes(b"a\r\nb\rc\n")
    assert read_prompt_text(path) == input_files.read_text(path) == "a\nb\nc\n"
