# SPDX-License-Identifier: Apache-2.0
"""Calls from an API server process to its engines' cores and workers, and two helpers for ASGI messages."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Call = Callable[..., Awaitable[Any]]
"""Calls a method of all workers of an engine, with the method's arguments."""


def engine_calls(engine_client: Any, method: str) -> dict[str, Call]:
    """Return functions that call a method of each engine's workers.

    The client's ``collective_rpc`` calls all engines but returns only the first engine's answer.
    """
    core = engine_client.engine_core
    numbers = [str(number) for number in getattr(core, "engine_ranks_managed", [0])]
    if len(numbers) == 1:
        return {numbers[0]: lambda *args: engine_client.collective_rpc(method, None, args)}

    def call_of(engine: Any) -> Call:
        return lambda *args: core._call_utility_async("collective_rpc", method, None, args, None, engine=engine)

    return {number: call_of(engine) for number, engine in zip(numbers, core.core_engines)}


async def call_engines(
    engine_client: Any, method: str, *args: Any, timeout_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Call a method of the workers of all engines concurrently."""
    calls = engine_calls(engine_client, method)
    tasks = {engine: asyncio.ensure_future(call(*args)) for engine, call in calls.items()}
    await asyncio.wait(tasks.values(), timeout=timeout_s)
    answers, failed = {}, {}
    for engine, task in tasks.items():
        if not task.done():
            task.cancel()
            failed[engine] = f"no answer after {timeout_s:.0f} s"
        elif (error := task.exception()) is None:
            answers[engine] = task.result()
        else:
            failed[engine] = f"{type(error).__name__}: {error}"
    return answers, failed


def path_of(scope: Mapping[str, Any]) -> str:
    """Return a request's path below the app's mount point."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.rstrip("/")


async def send_with_body(send: Any, start: Mapping[str, Any], body: bytes) -> None:
    """Send an app's answer with another body."""
    headers = [(name, value) for name, value in start.get("headers", ()) if name.lower() != b"content-length"]
    await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})
