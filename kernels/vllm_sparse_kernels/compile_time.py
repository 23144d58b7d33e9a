# SPDX-License-Identifier: Apache-2.0
"""Compile-time constants of kernels: single constants at module level, and named groups as arguments of a launch."""

from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import triton.language as tl

Group = TypeVar("Group", bound=NamedTuple)

EQUAL = tl.constexpr(False)


class Constant(tl.constexpr):
    """A constant at module level that kernels read.

    At every launch, Triton compares a copy of each such constant of the kernel with its present value. The comparison
    of two ``tl.constexpr`` takes the host 1 µs, and the launches of a layer compare 73. A constant of this class is not
    copied, and its comparison with itself returns immediately.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "Constant":
        """Return the constant itself, which never changes."""
        return self

    def __ne__(self, other: object) -> tl.constexpr:
        """Compare the constant with another."""
        return EQUAL if other is self else super().__ne__(other)

    def __rmod__(self, other: int) -> int:
        """Divide a plain number, as which the interpreter passes ``tl.constexpr`` arguments."""
        return other % int(self.value)


LOG2_E = Constant(1.4426950408889634)
"""log2(e). Kernels compute exp(x) as exp2(x · LOG2_E). Host code reads ``LOG2_E.value``."""

LN_2 = Constant(0.6931471805599453)
"""ln(2), which converts logarithms of base 2 to natural logarithms."""


@lru_cache(maxsize=4096, typed=True)
def compile_time(group: Group) -> Group:
    """Return the same NamedTuple with every field as a ``tl.constexpr``.

    Triton compiles a variant of the kernel for each value of such a field, as for a parameter marked ``tl.constexpr``,
    and the kernel reads it by name: ``SHAPE.BLOCK_N``. Marking the whole tuple does not work: Triton 3.6 passes on its
    fields as plain numbers, which Triton's functions do not accept.

    Results are cached, which saves 4 of the 20 µs that such a launch takes on the host: Triton then finds the kernel by
    comparing the identity of the fields.
    """
    fields: list[Any] = [None if value is None else tl.constexpr(value) for value in group]
    return type(group)(*fields)
