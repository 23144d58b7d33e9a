# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, by the server's own tokenizer."""

import json
from pathlib import Path

from vllm_sparse_backend.measure.endpoint import Endpoint
from vllm_sparse_backend.measure.report import BenchError

MOST_CHARS = 200_000
"""Of one request to tokenize."""


def tokenize(endpoint: Endpoint, text: str) -> list[int]:
    """In pieces that end with a line."""
    ids: list[int] = []
    while text:
        cut = text.rfind("\n", 0, MOST_CHARS) + 1 if len(text) > MOST_CHARS else len(text)
        ids += endpoint.tokenize(text[: cut or MOST_CHARS], special=False)
        text = text[cut or MOST_CHARS :]
    return ids


def first_tokens(endpoint: Endpoint, given: str | None) -> list[int]:
    """What prompts start with: the given token, or what the tokenizer adds, or the bos token of the model's folder.

    The tokenizer of a model that was trained with a bos token does not always add it, and attention without its sink is
    another one.
    """
    if given is None:
        plain, full = endpoint.tokenize("a", special=False), endpoint.tokenize("a")
        if plain and plain[0] in full and (added := full[: full.index(plain[0])]):
            return added
        if not endpoint.root:
            return []
        try:
            config = json.loads((Path(endpoint.root) / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []  # a name that the server resolved, or a folder of another machine
        bos = config.get("bos_token")
        given = bos.get("content") if isinstance(bos, dict) else bos
    if not given:
        return []
    ids = endpoint.tokenize(given, special=False)
    if len(ids) != 1:
        raise BenchError(f"--first-token: {given!r} is {len(ids)} tokens of {endpoint.model}, expected one")
    return ids
