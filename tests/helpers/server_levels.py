# SPDX-License-Identifier: Apache-2.0
"""Settings of the server that all tests share: a profile with a level for each behaviour under test."""

from pathlib import Path
from typing import Any

from tests.helpers.folders import profile_file

MIN_TOKENS = 256
"""Less than a chunk, so every chunk is sparse, except for the start of the first."""

ALL: dict[str, dict[str, Any]] = {
    "high": {"default": {"method": "vertical_slash", "vertical_tokens": 64, "slash_tokens": 104}},
    "fast": {"default": {"method": "a_shape", "sink_tokens": 64, "local_tokens": 128}, "dense_layers": [1]},
    "everything": {"default": {"method": "dense"}},
}
"""Levels of the shared server. ``high`` is its default level."""


def write(folder: Path, *names: str) -> dict[str, Any]:
    """Return settings of a server with these levels, the first as its default."""
    default_level, *others = names
    levels = {name: ALL[name] for name in others}
    path = profile_file(
        folder, min_tokens=MIN_TOKENS, min_query_tokens=1, level=default_level, **ALL[default_level], levels=levels
    )
    return {"profile": path}
