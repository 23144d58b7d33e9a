# SPDX-License-Identifier: Apache-2.0
"""Entries of crossover tables."""

import json
from typing import Any

CARD = "NVIDIA H100 80GB HBM3"


def entry(min_tokens: int | None, min_query_tokens: int | None = 512, **changes: Any) -> dict[str, Any]:
    """Return a measurement of a_shape on ``CARD`` in an 8B model, with these changes."""
    fields = {"device": CARD, "engine": "flash", "method": "a_shape", "params": {}, "num_heads": 32, "num_kv_heads": 8}
    fields |= {"head_dim": 128, "vllm": "0.26.0", "triton": "3.6.0", "date": "2026-11-21", "command": "sparse-prefill"}
    fields |= {"layer_weights": 218_103_808, "min_pairs": 0, "pairs_per_token": 0}
    return fields | {"min_tokens": min_tokens, "min_query_tokens": min_query_tokens} | changes


def written(*entries: dict[str, Any]) -> str:
    """Return the text of a table with these measurements."""
    return json.dumps({"format": 1, "entries": entries})
