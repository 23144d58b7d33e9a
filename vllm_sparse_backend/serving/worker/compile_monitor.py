# SPDX-License-Identifier: Apache-2.0
"""What Triton compiles of this project's kernels: all of it before the server reports ready, or it is counted and told.

Triton calls a listener whenever a process meets a kernel for arguments of a new kind, whether it then compiles it or
finds it on disk: either keeps a request waiting, so both count.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_sparse_backend.identity import LOGGER

logger = logging.getLogger(LOGGER)

PACKAGE = "vllm_sparse_kernels"


class Listener:
    """Counts kernels of this project, and passes every call on to who listened before."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.warming_up = False
        self.counts = {"warmup": 0, "serving": 0}

    def __call__(self, **event: Any) -> None:
        if self.before is not None:
            self.before(**event)
        kernel = getattr(event.get("src"), "fn", None)
        if str(getattr(kernel, "module", "")).partition(".")[0] != PACKAGE:
            return
        when = "warmup" if self.warming_up else "serving"
        self.counts[when] += 1
        if when == "serving":
            logger.warning(
                "sparse-prefill: kernel %s was compiled while serving, after warm-up; please report it",
                getattr(kernel, "__name__", kernel),
            )


def listener() -> Listener:
    """This process's listener, which listens from now on."""
    from triton import knobs

    if not isinstance(knobs.compilation.listener, Listener):
        knobs.compilation.listener = Listener(knobs.compilation.listener)
    return knobs.compilation.listener


def counts() -> dict[str, int]:
    """Compilations of this process by when they were, since it began to listen."""
    from triton import knobs

    ours = knobs.compilation.listener
    return ours.counts if isinstance(ours, Listener) else {"warmup": 0, "serving": 0}


@contextmanager
def warming_up() -> Iterator[None]:
    """What is compiled within is no surprise."""
    ours = listener()
    before, ours.warming_up = ours.warming_up, True
    try:
        yield
    finally:
        ours.warming_up = before
