# SPDX-License-Identifier: Apache-2.0
"""Sets of layers or heads in the notation ``0-3,7``."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

MAX_NUMBER = 1 << 12
"""Largest layer or head number; keeps a typo such as ``0-99999999`` from filling the memory."""
MOST_COUNT = 1 << 30
"""Largest count of tokens, queries or blocks: kernels count in 32 bits, and the sum of two such counts still fits."""
_PART = re.compile(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?")


def parse_ranges(text: object) -> tuple[int, ...]:
    """Parse a set of numbers."""
    if isinstance(text, list | tuple) and all(type(number) is int and number >= 0 for number in text):
        return _sorted(text, text)
    expected = f"given {text!r}, expected numbers and ranges such as '0-3,7'"
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ValueError(expected)
    numbers: list[int] = []
    for part in str(text).split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(expected)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > MAX_NUMBER:
            raise ValueError(
                f"given {text!r}, expected the range {part.strip()!r} in ascending order, with numbers up to "
                f"{MAX_NUMBER}"
            )
        numbers += range(first, last + 1)
    return _sorted(numbers, text)


def _sorted(numbers: Sequence[int], text: object) -> tuple[int, ...]:
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"given {text!r}, expected each number once")
    return tuple(sorted(numbers))


def format_ranges(numbers: Iterable[int]) -> str:
    """Format a set of numbers; the inverse of ``parse_ranges``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _disjoint(mapping: object) -> object:
    """Refuse a number that two keys of a mapping contain. This runs before parsing, because equal keys merge."""
    owners: dict[int, object] = {}
    for key in mapping if isinstance(mapping, Mapping) else ():
        try:
            numbers = parse_ranges(key)
        except ValueError:
            continue  # validation of the key reports the error and its place
        for number in numbers:
            if owners.setdefault(number, key) is not key:
                raise ValueError(f"given {number} in both {owners[number]!r} and {key!r}, expected it once")
    return mapping


def _serialize(numbers: tuple[int, ...]) -> int | str:
    return numbers[0] if len(numbers) == 1 else format_ranges(numbers)


Ranges = Annotated[
    tuple[int, ...],
    BeforeValidator(parse_ranges, json_schema_input_type=str | int | list[int]),
    PlainSerializer(_serialize),
]
"""A set of layers or heads, sorted."""
DisjointRanges = BeforeValidator(_disjoint)
"""Validator of a mapping with ``Ranges`` as keys, no two of which overlap."""
