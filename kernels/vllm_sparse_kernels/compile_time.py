# SPDX-License-Identifier: Apache-2.0
"""Groups of values that a kernel is compiled for, under names."""

from typing import Any, NamedTuple, TypeVar

import triton.language as tl

Group = TypeVar("Group", bound=NamedTuple)


def compile_time(group: Group) -> Group:
    """Return the same NamedTuple with every field a ``tl.constexpr``.

    Triton compiles a kernel anew for each value of such a field, as it does for a parameter marked ``tl.constexpr``,
    and a kernel reads it by name: ``SHAPE.BLOCK_N``. A whole tuple marked so would not do: Triton 3.6 hands on plain
    numbers from it, which its own functions do not take.

    Args:
        group: numbers, truth values and strings. None stays as it is, which Triton treats as known anyway.

    Returns:
        A tuple of the same class, for a launch.
    """
    fields: list[Any] = [None if value is None else tl.constexpr(value) for value in group]
    return type(group)(*fields)
