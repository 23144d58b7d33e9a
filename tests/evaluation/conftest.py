# SPDX-License-Identifier: Apache-2.0
"""A small random model in a folder, by default a Llama, made with transformers; nothing is downloaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Callable[..., Path]:
    """Return a function that makes a model folder without a tokenizer; keyword arguments replace fields of its
    configuration."""
    transformers = pytest.importorskip("transformers", reason="capturing needs transformers, which comes with vLLM")

    def make(name: str = "tiny", seed: int = 0, family: str = "Llama", **fields: object) -> Path:
        shape = {
            "vocab_size": 97, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        } | fields  # fmt: skip
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**shape)
        network = getattr(transformers, f"{family}ForCausalLM")(config)
        folder = tmp_path_factory.mktemp(name)
        network.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def prompt() -> list[int]:
    return torch.randint(97, (333,), generator=torch.Generator().manual_seed(7)).tolist()
