# SPDX-License-Identifier: Apache-2.0
"""Where in a foreign file something is wrong."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def each(what: str, given: Iterable[Given], make: Callable[[Given], Made]) -> list[Made]:
    """What ``make`` makes of each one; its ValueError says which of them it is."""
    made = []
    for number, one in enumerate(given):
        try:
            made.append(make(one))
        except ValueError as error:
            raise ValueError(f"{what} {number}: {error}") from None
    return made
