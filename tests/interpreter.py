# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, with its language prepared once a launch rather than at every call of a device function.

To interpret a kernel is to replace the functions of ``triton.language`` for as long as the kernel runs. Triton does so
at its launch and again, with nothing left to replace, at each call of a function within it: a third of the time of our
kernel tests. What is computed, and every check of it, stays Triton's.
"""

from collections.abc import Callable
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


def prepare_once_a_launch() -> None:
    if not isinstance(interpreter._patch_lang, _Prepared):
        interpreter._patch_lang = _Prepared(interpreter._patch_lang)
