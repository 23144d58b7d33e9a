# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without the work whose results it throws away: more than half of the time of our kernel tests.

* To interpret a kernel is to replace the functions of ``triton.language`` for as long as the kernel runs. Triton does
  so at its launch and again, with nothing left to replace, at each call of a function within it.
* Every sum, difference and product of integers is computed in 64 bits too, to be asserted equal: but nothing is
  asserted unless ``options.debug`` is set, and the interpreter has no way to set it.

What kernels compute, and every check of it that is made, stays Triton's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def _language_in(function: Callable[..., Any]) -> tuple[int, ...]:
    """Which of the language's modules the function's globals name: those are prepared for it."""
    return tuple({id(value) for value in function.__globals__.values() if value is tl or value is tl.core})


class _Prepared:
    """In place of the interpreter's ``_patch_lang``: what a launch has prepared is not prepared again until it ends."""

    def __init__(self, prepare: Callable[[Callable[..., Any]], Any]) -> None:
        self.prepare = prepare
        self.scopes: dict[tuple[int, ...], Any] = {}

    def __call__(self, function: Callable[..., Any]) -> "_Prepared":
        language = _language_in(function)
        if language not in self.scopes:
            self.scopes[language] = self.prepare(function)
        return self

    def restore(self) -> None:
        """At a launch's end, by the interpreter itself."""
        while self.scopes:
            self.scopes.popitem()[1].restore()


def save_what_is_thrown_away() -> None:
    builder = interpreter.interpreter_builder
    interpreter._patch_lang = _Prepared(interpreter._patch_lang)
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
