# SPDX-License-Identifier: Apache-2.0
"""Sets of layers or heads as people write them: ``0-3,7``."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

MAX_NUMBER = 1 << 12  # so that a slip of the keyboard doesn't fill the memory
MOST_COUNT = 1 << 30
"""Of tokens, queries, blocks and whatever else settings count: kernels do so in 32 bits, where two of these add up."""
_PART = re.compile(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?")


def parse_ranges(text: object) -> tuple[int, ...]:
    """``"0-3,7"``, ``7``, or a list of numbers, sorted. Raises ValueError if it is none of these or names one twice."""
    if isinstance(text, list | tuple) and all(type(number) is int and number >= 0 for number in text):
        if len(set(text)) != len(text):
            raise ValueError(f"given {text!r}, expected each number once")
        return tuple(sorted(text))
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
            raise ValueError(f"given {text!r}, expected the range {part.strip()!r} to rise, up to {MAX_NUMBER} at most")
        numbers += range(first, last + 1)
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"given {text!r}, expected each number once")
    return tuple(sorted(numbers))


def format_ranges(numbers: Iterable[int]) -> str:
    """The inverse of ``parse_ranges``: sorted, and as short as can be."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _disjoint(given: object) -> object:
    """Refuse a number that two keys of a mapping name: once they are parsed, equal keys would have become one."""
    owners: dict[int, object] = {}
    for key in given if isinstance(given, Mapping) else ():
        try:
            numbers = parse_ranges(key)
        except ValueError:
            continue  # the key's own error is reported with its place
        for number in numbers:
            if owners.setdefault(number, key) is not key:
                raise ValueError(f"given {number} in both {owners[number]!r} and {key!r}, expected it once")
    return given


RANGES_PATTERN = f"^{_PART.pattern}(?:,{_PART.pattern})*$"
_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": RANGES_PATTERN},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "uniqueItems": True},
    ]
}


def _written(numbers: tuple[int, ...]) -> int | str:
    return numbers[0] if len(numbers) == 1 else format_ranges(numbers)


Ranges = Annotated[tuple[int, ...], BeforeValidator(parse_ranges), PlainSerializer(_written), WithJsonSchema(_SCHEMA)]
DisjointRanges = BeforeValidator(_disjoint)
"""For a mapping with ``Ranges`` as keys."""
