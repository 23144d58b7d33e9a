# SPDX-License-Identifier: Apache-2.0
"""Sizes of linear layers, from configs of known models."""

import json
from pathlib import Path

import pytest

from tests.helpers.folders import LLAMA_8B
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.layer_weights import layer_weights_if_known, mean_layer_weights
from vllm_sparse_backend.config.model_check import read_config
from vllm_sparse_backend.config.model_shape import ModelShape

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}  # fmt: skip


WEIGHTS_8B = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336


def weights_of(config: dict, folder: Path) -> int:
    (folder / "config.json").write_text(json.dumps(config))
    return mean_layer_weights(read_config(folder), ModelShape.from_folder(folder), str(folder / "config.json"))


def test_attention_and_feed_forward_layers_count(tmp_path: Path) -> None:
    assert weights_of(LLAMA_8B, tmp_path) == WEIGHTS_8B


def test_only_active_experts_count(tmp_path: Path) -> None:
    attention = 2048 * 128 * (2 * 32 + 2 * 4)
    assert weights_of(QWEN3_30B_A3B, tmp_path) == attention + 8 * 3 * 2048 * 768


def test_the_text_part_of_a_multimodal_model_counts(tmp_path: Path) -> None:
    assert weights_of({"architectures": ["X"], "text_config": LLAMA_8B, "vision_config": {}}, tmp_path) == WEIGHTS_8B


def test_widths_that_differ_between_layers_count_as_their_mean(tmp_path: Path) -> None:
    assert weights_of({**LLAMA_8B, "intermediate_size": [14000, 14672]}, tmp_path) == WEIGHTS_8B


def test_kinds_of_layers_that_are_numbers_count_as_attention(tmp_path: Path) -> None:
    """A server reads the sizes of every model, and must not stop."""
    config = {**LLAMA_8B, "layer_types": [0, 1] * 16}
    assert mean_layer_weights(config, ModelShape.from_config(config), "config.json") == WEIGHTS_8B


@pytest.mark.parametrize("width", ["wide", [1, "2"], -1, 10**400], ids=["text", "list", "negative", "huge"])
def test_a_width_that_is_no_number_names_its_file(width: object, tmp_path: Path) -> None:
    config = {**LLAMA_8B, "intermediate_size": width}
    with pytest.raises(ConfigurationError, match=r"config.json: intermediate_size: .*one number for all layers"):
        weights_of(config, tmp_path)
    assert layer_weights_if_known(config, ModelShape.from_config(config)) is None
