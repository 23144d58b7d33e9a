# SPDX-License-Identifier: Apache-2.0
"""Files in the formats of other tools, for a model of 3 layers and 4 heads."""

import json
from pathlib import Path
from typing import Any

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


def save(content: Any, path: Path) -> Path:
    path.write_text(json.dumps(content))
    return path
