# SPDX-License-Identifier: Apache-2.0
"""Foreign files as their tools write them, for a model of 3 layers and 4 heads."""

import json
from pathlib import Path
from typing import Any

import torch

NUM_LAYERS, NUM_HEADS = 3, 4
CONFIG = {"architectures": ["M"], "num_hidden_layers": NUM_LAYERS, "num_attention_heads": NUM_HEADS, "hidden_size": 64}


def patterns() -> list[dict[str, list[Any]]]:
    layers: list[dict[str, list[Any]]] = [
        {str(head): ["vertical_and_slash", 1000, 6096, 0.9] for head in range(NUM_HEADS)} for _ in range(NUM_LAYERS)
    ]
    layers[1]["2"] = layers[1]["3"] = ["stream_llm", 100, 800, 5]
    layers[2]["0"] = ["block_sparse", 10, 1, 0.5]
    layers[2]["3"] = ["vertical_and_slash", 30, 800, 12982]
    return layers


def clusters() -> dict[str, Any]:
    return {
        "clusters": {"42": [[0, 0], [0, 2], [2, 1]], "9": [[0, 1], [1, 1], [2, 3]], "7": [[1, 0]]},
        "shared_clusters": ["9"],
    }


def sparge_state() -> dict[str, Any]:
    state: dict[str, Any] = {}
    for layer in range(NUM_LAYERS):
        path = f"model.layers.{layer}.self_attn.inner_attention"
        state[f"{path}.is_sparse"] = torch.tensor([True, True, layer > 0, layer > 0])
        state[f"{path}.cdfthreshd"] = torch.tensor([0.9375, 0.9688, 0.9, 0.9])
        state[f"{path}.simthreshd1"] = torch.tensor([0.3125, -0.5, 0.0, 0.0])
        state[f"{path}.simthreshd2"] = torch.zeros(NUM_HEADS)
        state[f"{path}.pvthreshd"] = torch.tensor([20.0, 4.4141, 1.0, 1.0])
    return state


def sale_thresholds() -> Any:
    return torch.tensor([[0.008, 0.004, 0.002, 0.0], [0.008] * NUM_HEADS, [0.0] * NUM_HEADS])


def save(content: Any, path: Path) -> Path:
    """As its tool does: JSON, or torch.save where it has tensors."""
    try:
        path.write_text(json.dumps(content))
    except TypeError:
        torch.save(content, path)
    return path
