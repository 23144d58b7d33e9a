# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of settings and GPUs in the documents, from the code that defines them.

    python -m benchmarks.settings_tables

A table is between ``<!-- settings:begin NAME -->`` and ``<!-- settings:end -->``; NAME is a key of ``TABLES``.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_sparse_backend.config.errors import Section
from vllm_sparse_backend.config.ranges import MOST_COUNT
from vllm_sparse_backend.config.settings import RequestsConfig, SparsePrefillConfig
from vllm_sparse_kernels.attention import widest_block
from vllm_sparse_kernels.cards import CARDS, HOPPER_CAPABILITY

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "docs/compatibility.md", "docs/settings.md", "docs/requests_reference.md",
)  # fmt: skip
REGION = re.compile(r"(<!-- settings:begin (\w+) -->\n).*?(<!-- settings:end -->)", re.DOTALL)
PAGE = re.compile(r"(?<![\w/`(\[])((?:docs|profiles|deploy)/[\w/.-]+\.md)(#[\w-]+)?")
"""A page in a field's description, as a path from the root, with or without an anchor."""
COMMON_HEAD_DIMS = (64, 128, 256)
"""Head dims for which the table of GPUs says whether layers can run sparse."""
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a Markdown table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def in_code(value: object) -> str:
    """Format a value as an operator writes it."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def type_text(schema: Mapping[str, Any]) -> str:
    """Describe the type of a field."""
    if "anyOf" in schema:
        alternatives = [type_text(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return ", or ".join(alternatives)
    if "enum" in schema:
        return ", ".join(map(in_code, schema["enum"]))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "$ref" in schema or schema["type"] == "object":
        return "object"
    if schema["type"] == "array":
        kind, _, limits = type_text(schema["items"]).partition(" ")
        return f"list of {kind}s {limits}".rstrip()
    limits = " and ".join(
        f"{sign} {schema[key]:g}"
        for key, sign in LIMITS.items()
        if schema.get(key) not in (None, MOST_COUNT)  # no sensible count comes near its limit
    )
    return f"{schema['type']} {limits}".rstrip()


def default_text(value: object) -> str:
    """Format the default of a field."""
    if value is None:
        return "none"
    if isinstance(value, Section):
        value = value.model_dump(exclude_defaults=True)
    return in_code(value)


def settings_table(section: type[Section]) -> str:
    """Build the table of a section's fields."""
    schemas = section.model_json_schema()["properties"]
    rows = []
    for name, field in section.model_fields.items():
        if not field.description:
            raise ValueError(f"{section.__name__}.{name}: given no description, expected a text under the field")
        description = " ".join(field.description.split())
        rows.append([f"`{name}`", type_text(schemas[name]), default_text(field.get_default()), description])
    return markdown_table(["Setting", "Type", "Default", "Description"], rows)


def cards_table() -> str:
    """Build the table of GPUs."""
    rows = []
    for card in CARDS:
        head_dims = [str(dim) for dim in COMMON_HEAD_DIMS if widest_block(dim, card.shared_bytes) is not None]
        capability = ".".join(map(str, card.capability))
        engines = "`hopper`, `flash`, `portable`" if card.capability == HOPPER_CAPABILITY else "`flash`, `portable`"
        status = "measured" if card.is_measured else "compiled, never run"
        shared = f"{card.shared_bytes >> 10} KiB"
        rows.append([capability, card.names, shared, ", ".join(head_dims), engines, status])
    header = ["Compute capability", "GPUs", "Shared memory of a program", "Head dims", "Engines", "Status"]
    return markdown_table(header, rows)


TABLES: dict[str, Callable[[], str]] = {
    "sparse_prefill": lambda: settings_table(SparsePrefillConfig),
    "requests": lambda: settings_table(RequestsConfig),
    "cards": cards_table,
}


def fill(text: str, document: str) -> str:
    """Replace the tables in a document."""

    def link(match: re.Match[str]) -> str:
        page, anchor = match[1], match[2] or ""
        return f"[{page}]({os.path.relpath(page, Path(document).parent)}{anchor})"

    def region(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            names = ", ".join(TABLES)
            raise ValueError(f"{document}: given <!-- settings:begin {match[2]} -->, expected one of {names}")
        return f"{match[1]}\n{PAGE.sub(link, TABLES[match[2]]())}\n{match[3]}"

    return REGION.sub(region, text)


def main() -> None:
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(fill(path.read_text(), document))


if __name__ == "__main__":
    main()
