# SPDX-License-Identifier: Apache-2.0
"""Calls from an API server process to its engines' workers, and the path of an ASGI request."""

from collections.abc import Awaitable, Callable, Mapping
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


def path_of(scope: Mapping[str, Any]) -> str:
    """Return a request's path below the app's mount point."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.rstrip("/")
