# SPDX-License-Identifier: Apache-2.0
"""Calls from an API server process to its engines' workers."""

from collections.abc import Awaitable, Callable
from typing import Any

Call = Callable[[], Awaitable[Any]]
"""Calls a method of all workers of an engine."""


def engine_calls(engine_client: Any, method: str) -> dict[str, Call]:
    """Return functions that call a method of each engine's workers."""
    core = engine_client.engine_core
    numbers = [str(number) for number in getattr(core, "engine_ranks_managed", [0])]
    if len(numbers) == 1:
        return {numbers[0]: lambda: engine_client.collective_rpc(method)}

    # The client's ``collective_rpc`` calls all engines but returns only the first engine's answer.
    def call_of(engine: Any) -> Call:
        return lambda: core._call_utility_async("collective_rpc", method, None, (), None, engine=engine)

    return {number: call_of(engine) for number, engine in zip(numbers, core.core_engines)}
