# SPDX-License-Identifier: Apache-2.0
"""Folders and files for tests: a model's config.json, a profile."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_sparse_backend.config.profile import Profile

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336,
}  # fmt: skip


def model_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """Return a model folder with this config.json and no weights; make it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def profile_file(folder: Path, **fields: Any) -> str:
    """Return the path of a new profile in the folder, for any model unless the fields say otherwise."""
    profile = Profile.model_validate({"format": 1, "model": "any"} | fields)
    path = folder / f"{len(list(folder.iterdir()))}.yaml"
    path.write_text(profile.to_yaml())
    return str(path)
