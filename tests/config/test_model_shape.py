# SPDX-License-Identifier: Apache-2.0
"""The name of a model, which profiles record."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_sparse_backend.config.model_shape import ModelShape

CONFIG = {"architectures": ["M"], "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("Qwen/Qwen2-7B-Instruct", ("Qwen/Qwen2-7B-Instruct",)),
        ("/models/Qwen2-7B-Instruct/", ("Qwen2-7B-Instruct",)),
        ("./models/mine", ("mine",)),
        ("/c/hub/models--Qwen--Qwen2-7B-Instruct/snapshots/0123abc", ("Qwen/Qwen2-7B-Instruct",)),
        *((nameless, ()) for nameless in ("", "/", None, 3)),
    ],
)
def test_name_of_a_path(path: Any, names: tuple[str, ...]) -> None:
    assert ModelShape.from_config(CONFIG | {"_name_or_path": path}).names == names


def test_a_folder_names_its_model_as_it_does_on_a_server(tmp_path: Path) -> None:
    (folder := tmp_path / "Mine").mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"_name_or_path": "o/Base"}))
    assert ModelShape.from_folder(folder).names == ("Mine",)
    assert ModelShape.from_folder(folder / "config.json").names == ("o/Base",)
