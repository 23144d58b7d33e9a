# SPDX-License-Identifier: Apache-2.0
"""Markdown tables, and the places in a document that are written by a program."""

from collections.abc import Sequence
from pathlib import Path

from vllm_sparse_backend.settings.errors import ConfigurationError


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows))


def put_between(path: Path, begin: str, end: str, body: str) -> None:
    """Write ``body`` between two marks of a file, each of which it has once. Raises ConfigurationError otherwise."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(begin) != 1 or end not in text.split(begin)[1]:
        raise ConfigurationError(f"{path}: expected a file with one line {begin!r} and, after it, one {end!r}")
    before, after = text.split(begin)
    path.write_text(f"{before}{begin}\n\n{body.strip()}\n\n{end}{after.split(end, 1)[1]}", encoding="utf-8")
