# SPDX-License-Identifier: Apache-2.0
"""How a server's process asks its engines' workers and cores, and how it answers with what they said."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
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


async def answers_of(asked: Mapping[str, Awaitable[Any]], limit_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """By engine, what it answers to what it is asked, and why others do not, whatever it is that they raise."""
    tasks = {engine: asyncio.ensure_future(one) for engine, one in asked.items()}
    await asyncio.wait(tasks.values(), timeout=limit_s)
    answers, failed = {}, {}
    for engine, task in tasks.items():
        if not task.done():
            task.cancel()
            failed[engine] = f"no answer after {limit_s:.0f} s"
        elif (error := task.exception()) is None:
            answers[engine] = task.result()
        else:
            failed[engine] = f"{type(error).__name__}: {error}"
    return answers, failed


def path_of(scope: Mapping[str, Any]) -> str:
    """Of a request, without where the app is mounted."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.rstrip("/")


async def send_whole(send: Any, start: Mapping[str, Any], body: bytes) -> None:
    """An app's answer with another body than it had when it began with the message ``start``."""
    headers = [(name, value) for name, value in start.get("headers", ()) if name.lower() != b"content-length"]
    await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})
