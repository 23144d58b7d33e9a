# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware that refuses levels where vLLM would drop them.

On the paths below, vLLM makes new sampling parameters or has no field for ``vllm_xargs``, so an exact request would
silently run at the server's default level. On all other paths the level arrives with the sampling parameters, and is
checked there (``level_policy.py``). The body is inspected while the app reads it, so a body that is never read (unknown
path, no authorisation) costs nothing. It is parsed only if it contains the key ``sparse_prefill``. Forms (of
transcriptions) are not inspected.
"""

import asyncio
import json
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException

from vllm_sparse_backend.config.request_levels import FIELD
from vllm_sparse_backend.serving.frontend.engine_rpc import path_of

if TYPE_CHECKING:
    from vllm_sparse_backend.serving.frontend.endpoint import SparsePrefillEndpoint

NO_FIELD = "vLLM has no field for it on this path"
DROPS_LEVEL = {
    "/generative_scoring": "scoring makes new sampling parameters",
    "/v1/systemone": "structured decisions make new sampling parameters",
    "/inference/v1/generate": "this path reads a level from sampling_params.extra_args",
    "/cohere/v2/chat": NO_FIELD,
    "/cohere/v2/chat/render": NO_FIELD,
}
"""Paths on which vLLM drops the level of every request, with the reason."""

HAS_BEAMS = {"/v1/completions", "/v1/chat/completions", "/invocations"}
"""Paths on which vLLM drops the level of a request with ``use_beam_search``."""
BEAMS = "beam search makes new sampling parameters"

KEY = FIELD.encode()


class LevelsMiddleware:
    """Refuses levels. It runs inside vLLM's own middleware, which has already checked the API key."""

    def __init__(self, app: Any, endpoint: "SparsePrefillEndpoint") -> None:
        self.app = app
        self.endpoint = endpoint

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if self.endpoint.runs_backend and scope["type"] == "http" and scope["method"] == "POST":
            path = path_of(scope)
            reason = DROPS_LEVEL.get(path)
            if reason is not None or path in HAS_BEAMS:
                receive = JsonBody(receive, reason)
        await self.app(scope, receive, send)


class JsonBody:
    """ASGI ``receive`` for an app, which inspects the body's ``vllm_xargs`` and ``use_beam_search``."""

    def __init__(self, receive: Any, reason: str | None) -> None:
        self.receive = receive
        self.reason = reason
        """Why vLLM drops the level of every request on this path; None if it does so only with beam search."""
        self.chunks: list[bytes] = []

    async def __call__(self) -> dict[str, Any]:
        message: dict[str, Any] = await self.receive()
        if message["type"] == "http.request":
            self.chunks.append(message.get("body", b""))
            if not message.get("more_body"):
                await self._refuse_level()
        return message

    async def _refuse_level(self) -> None:
        body, self.chunks = b"".join(self.chunks), []
        if KEY not in body or (self.reason is None and b"use_beam_search" not in body):
            return
        vllm_xargs, has_beams = await asyncio.to_thread(top_fields, body)
        reason = self.reason or (BEAMS if has_beams else None)
        if reason is not None and isinstance(vllm_xargs, dict) and FIELD in vllm_xargs:
            raise refusal(reason)


def top_fields(body: bytes) -> tuple[Any, bool]:
    """Return ``vllm_xargs`` and ``use_beam_search`` at the top of a JSON body."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # vLLM reports the error
        return None, False
    if not isinstance(fields, dict):
        return None, False
    return fields.get("vllm_xargs"), bool(fields.get("use_beam_search"))


def refusal(reason: str) -> HTTPException:
    """Return the error that vLLM's app answers with status 400."""
    where = f"vllm_xargs: given the key {FIELD!r}, expected no level"
    return HTTPException(400, f"{where}: {reason}, so this request runs at the server's default level; remove the key")
