# SPDX-License-Identifier: Apache-2.0
"""How a server's process asks its engines' workers and cores."""

from collections.abc import Awaitable, Callable
from typing import Any

Ask = Callable[..., Awaitable[Any]]
"""With the arguments of a method of all workers of an engine."""


def engines_of(client: Any, method: str) -> dict[str, Ask]:
    """By its number, how to call a method of each engine that a server's client knows: of all of its workers at once.

    ``collective_rpc`` asks all engines, but hands on what the first one answers.
    """
    core = client.engine_core
    numbers = [str(number) for number in getattr(core, "engine_ranks_managed", [0])]
    if len(numbers) == 1:
        return {numbers[0]: lambda *given: client.collective_rpc(method, None, given)}

    def asking(engine: Any) -> Ask:
        return lambda *given: core._call_utility_async("collective_rpc", method, None, given, None, engine=engine)

    return {number: asking(engine) for number, engine in zip(numbers, core.core_engines)}
