# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware that polls the engines before a GET /metrics, and refuses levels where vLLM would drop them.

On the paths below, vLLM makes new sampling parameters or has no field for ``vllm_xargs``, so an exact request would
silently run at the server's default level. On all other paths the level arrives with the sampling parameters, and is
checked there (``level_policy.py``). The body is inspected while the app reads it, so a body that is never read (unknown
path, no authorisation) costs nothing. It is parsed only if it contains the key ``sparse_prefill``.
"""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException

from vllm_sparse_backend.config.request_levels import FIELD
from vllm_sparse_backend.serving.frontend.metrics_endpoint import poll_for_page

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

HAS_BEAMS = {
    "/v1/completions", "/v1/chat/completions", "/invocations", "/v1/audio/transcriptions", "/v1/audio/translations",
}  # fmt: skip
"""Paths on which vLLM drops the level of a request with ``use_beam_search``."""
BEAMS = "beam search makes new sampling parameters"

KEY = FIELD.encode()
FORM_BEAMS = re.compile(
    rb'name="?use_beam_search\b[^\n]*\n(?:[\w-]+:[^\n]*\n)*\r?\n(?:true|1|on|yes|t|y)\b', re.IGNORECASE
)
"""``use_beam_search`` in a form, with a value that vLLM reads as true."""
FORM_WINDOW = 512
"""Bytes of a form that are kept, to find a field that two chunks share."""


@dataclass
class SparsePrefillMiddleware:
    """Runs inside vLLM's own middleware, which has already checked the API key."""

    app: Any
    endpoint: "SparsePrefillEndpoint"

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        polls = self.endpoint.polls
        if polls is not None and scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")  # below the app's mount point
            if path == "/metrics":
                await poll_for_page(polls, scope)
            elif scope["method"] == "POST":
                receive = inspect(path, scope, receive)
        await self.app(scope, receive, send)


class JsonBody:
    """Inspects the body's ``vllm_xargs`` and ``use_beam_search`` once it is complete."""

    def __init__(self, reason: str | None) -> None:
        self.reason = reason
        """Why vLLM drops the level of every request on this path; None if it does so only with beam search."""
        self.chunks: list[bytes] = []

    async def add(self, chunk: bytes, is_last: bool) -> None:
        self.chunks.append(chunk)
        if not is_last:
            return
        body, self.chunks = b"".join(self.chunks), []
        if KEY not in body or (self.reason is None and b"use_beam_search" not in body):
            return
        vllm_xargs, has_beams = await asyncio.to_thread(top_fields, body)
        reason = self.reason or (BEAMS if has_beams else None)
        if reason is not None and isinstance(vllm_xargs, dict) and FIELD in vllm_xargs:
            raise refusal(reason)


@dataclass
class FormBody:
    """Inspects the fields of a form without keeping its files in memory."""

    window: bytes = b""
    has_level: bool = False
    has_beams: bool = False

    async def add(self, chunk: bytes, is_last: bool) -> None:
        seen = self.window + chunk
        self.window = seen[-FORM_WINDOW:]
        self.has_level |= KEY in seen
        self.has_beams |= FORM_BEAMS.search(seen) is not None
        if self.has_level and self.has_beams:
            raise refusal(BEAMS)


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


def inspect(path: str, scope: dict[str, Any], receive: Any) -> Any:
    """Return the ``receive`` with which an app reads the body of a POST: it inspects what the app reads."""
    reason = DROPS_LEVEL.get(path)
    if reason is None and path not in HAS_BEAMS:
        return receive
    content_type = next((value for name, value in scope["headers"] if name.lower() == b"content-type"), b"")
    is_form = content_type.strip().lower().startswith(b"multipart/form-data")
    body = FormBody() if is_form else JsonBody(reason)

    async def receive_inspected() -> dict[str, Any]:
        message: dict[str, Any] = await receive()
        if message["type"] == "http.request":
            await body.add(message.get("body", b""), is_last=not message.get("more_body"))
        return message

    return receive_inspected
