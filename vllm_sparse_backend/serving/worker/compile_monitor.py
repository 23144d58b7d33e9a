# SPDX-License-Identifier: Apache-2.0
"""Counts the compilations of this project's kernels, and warns of each that happens after the server reported ready.

Triton calls a listener when a process first launches a kernel for a kind of arguments, whether it compiles the kernel
or loads it from disk. Both delay a request, so both count.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_sparse_backend.identity import logger

PACKAGE = "vllm_sparse_kernels"


class Listener:
    """Counts compilations of this project's kernels."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.warming_up = False
        self.counts = {"warmup": 0, "serving": 0}

    def __call__(self, **event: Any) -> None:
        if self.previous is not None:
            self.previous(**event)
        kernel = getattr(event.get("src"), "fn", None)
        if str(getattr(kernel, "module", "")).partition(".")[0] != PACKAGE:
            return
        when = "warmup" if self.warming_up else "serving"
        self.counts[when] += 1
        if when == "serving":
            logger.warning(
                "sparse-prefill: kernel %s was compiled while serving, after warm-up; please report this",
                getattr(kernel, "__name__", kernel),
            )


def listener() -> Listener:
    """Return this process's listener, which the first call installs."""
    from triton import knobs

    if not isinstance(knobs.compilation.listener, Listener):
        knobs.compilation.listener = Listener(knobs.compilation.listener)
    return knobs.compilation.listener


@contextmanager
def warming_up() -> Iterator[None]:
    """Count compilations within the context as warm-up."""
    current = listener()
    current.warming_up = True
    try:
        yield
    finally:
        current.warming_up = False
