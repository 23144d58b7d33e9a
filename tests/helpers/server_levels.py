# SPDX-License-Identifier: Apache-2.0
"""The settings of the server that all tests ask: a profile of one level for each thing that there is to see."""

from pathlib import Path
from typing import Any

from tests.helpers.folders import profile_file

MIN_TOKENS = 256
"""Fewer than a chunk's, so that every chunk is sparse, the first but for its first part."""

ALL: dict[str, dict[str, Any]] = {
    "high": {"default": {"method": "vertical_slash", "vertical_tokens": 64, "slash_tokens": 104}},
    "fast": {"default": {"method": "a_shape", "sink_tokens": 64, "local_tokens": 128}, "dense_layers": [1]},
    "everything": {"default": {"method": "dense"}},
}
"""``high`` is the server's own."""


def write(folder: Path, *names: str) -> dict[str, Any]:
    """Settings of a server with these levels, the first its own; with the switch, and a guard that never trips."""
    default_level, *others = names
    levels = {name: ALL[name] for name in others}
    path = profile_file(
        folder, min_tokens=MIN_TOKENS, min_query_tokens=1, level=default_level, **ALL[default_level], levels=levels
    )
    return {"profile": path, "guard": {"rate": 1.0, "bound": 1e6}, "switch": True}
