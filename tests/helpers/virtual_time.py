# SPDX-License-Identifier: Apache-2.0
"""Runs coroutines on a clock that jumps from one timer to the next, so that no outcome depends on the machine's load.

``asyncio.sleep`` and time limits take their time on this clock, and end at once. All else takes a microsecond for each
reading of the clock.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
TICK_S = 1e-6
"""A reading of the clock is later than the reading before it."""


class VirtualTime:
    """The clock, for coroutines without files or sockets to wait for. It stands in for the module ``time``."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    """The machine's clock: two answers at the same virtual time have different moments."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        self._now_s += TICK_S
        return self._now_s

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of a coroutine, like ``asyncio.run``."""
        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            return runner.run(coroutine)

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(_Selector(self))
        loop.time = self.monotonic  # type: ignore[method-assign]
        return loop

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds


class _Selector(selectors.SelectSelector):
    """Advances the clock to the next timer when nothing is left to run."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "the coroutine waits for something that cannot happen"
        self._clock._advance(max(timeout, 0.0))
        return super().select(0)
