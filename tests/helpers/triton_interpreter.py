# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without work whose results it discards, or already has: most of the time of our kernel tests.

* To interpret a kernel, Triton replaces the functions of ``triton.language`` while the kernel runs. It does so at the
  launch and again, with nothing left to replace, at each call of a function within it.
* It also computes every sum, difference and product of integers in 64 bits, to assert that they are equal. But it
  asserts nothing unless ``options.debug`` is set, and the interpreter has no way to set it.

Kernels' results, and all checks that Triton makes, are unchanged. ``sum_float32_products_in_float64`` changes results:
numpy sums the products of a matrix in an order that depends on its library and number of threads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@cache
def _language_in(function: Callable[..., Any]) -> tuple[int, ...]:
    """Return the modules of the language that the function's globals name; these are prepared for it."""
    return tuple({id(value) for value in function.__globals__.values() if value is tl or value is tl.core})


class _Prepared:
    """Replaces the interpreter's ``_patch_lang``: modules that a launch has prepared are not prepared again until it
    ends."""

    def __init__(self, prepare: Callable[[Callable[..., Any]], Any]) -> None:
        self.prepare = prepare
        self.scopes: dict[tuple[int, ...], Any] = {}

    def __call__(self, function: Callable[..., Any]) -> "_Prepared":
        language = _language_in(function)
        if language not in self.scopes:
            self.scopes[language] = self.prepare(function)
        return self

    def restore(self) -> None:
        """Restore the modules; the interpreter calls this at a launch's end."""
        while self.scopes:
            self.scopes.popitem()[1].restore()


def sum_float32_products_in_float64() -> None:
    """Let the interpreter sum products of float32 matrices in float64, and round once, whatever library numpy has."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype != np.float32 or d.data.dtype != np.float32:
            return create_dot(self, a, b, d, *options)
        sums = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(sums.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


def save_what_is_thrown_away() -> None:
    builder = interpreter.interpreter_builder
    interpreter._patch_lang = _Prepared(interpreter._patch_lang)
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
