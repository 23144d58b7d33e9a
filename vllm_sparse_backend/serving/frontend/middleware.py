# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware that reads the level of a posted request from its body.

It inspects the body while the app reads it: a request that the app answers without reading the body (unknown path, no
authorisation) costs nothing. A body is parsed a second time only if it may contain a key of ours, and in a thread if it
is long. The level depends on the body's choice and on the model that it names. It is decided before any part of an
answer is sent, and reaches the engine with all of the request's sampling parameters (``level_policy.HTTP_REQUEST``).
"""

import asyncio
import contextlib
import json
import re
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from vllm_sparse_backend.config.errors import TYPO_PARTS, ConfigurationError, looks_like, not_one_of, unexpected
from vllm_sparse_backend.config.request_levels import FIELD, Choices, RequestLevel
from vllm_sparse_backend.config.settings import KEY, OPTION
from vllm_sparse_backend.serving.frontend.engine_rpc import path_of
from vllm_sparse_backend.serving.level_policy import HTTP_REQUEST, HttpRequest, cached_choices, input_processor_of
from vllm_sparse_backend.serving.registration import is_selected

PREFILLING = {
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages",
    "/cohere/v2/chat", "/generative_scoring", "/v1/systemone", "/inference/v1/generate", "/invocations",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/completions/render", "/v1/chat/completions/render",
    "/v1/messages/render",
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
    "/v2/rerank",
}  # fmt: skip
"""vLLM's paths that prefill prompts, or that turn a body into a body for such a path. Paths of later releases refuse
levels until they are listed here."""

FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")

SMALL_BYTES = 1 << 16
"""Bodies up to this size are parsed on the event loop. Longer bodies are ignored on paths that do not prefill."""

MOST_KEYS = 200_000
"""Maximum number of keys of a body that may contain ours: parsing a larger body would block the event loop."""
KEY_END = re.compile(rb'"[ \t\r\n]*:')
"""The end of a key. After a backslash, the quote is part of a string instead."""
MOST_INSPECTED = 250_000
"""Maximum number of inspected keys and elements of a body. The outermost are inspected first."""
MOST_ELEMENTS = 10_000
"""Maximum number of inspected elements of a list. Prompts are long lists of numbers."""
MOST_SLIPS = 100
"""Maximum number of a body's keys that are compared with ours to find misspellings."""

SCHEMAS = {"tools", "functions", "response_format", "structured_outputs", "text", "guided_json"}
"""Fields that contain JSON schemas, in which users choose the names. They are not inspected, and neither are the
arguments of tool calls in a conversation."""

ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")
"""Prefix of an escaped letter: JSON allows it for any letter of a key."""


class Refused(HTTPException):
    """A refusal, raised into the app where it reads the body. FastAPI lets exceptions of this class through."""


class LevelsMiddleware:
    """ASGI middleware that reads levels, inside vLLM's own middleware, which has already checked the API key."""

    def __init__(self, app: Any, endpoint: "LevelsEndpoint") -> None:
        self.app = app
        self.endpoint = endpoint

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if self.endpoint.choices is None or scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        post = Post(self.endpoint, scope, receive, send)
        HTTP_REQUEST.set(post.request)
        try:
            if not post.prefills:
                await post.look_ahead()
            await self.app(scope, post.receive, post.send)
        except Exception:
            if post.refusal is None:
                raise
        if post.refusal is not None:
            await post.refuse()


class Post:
    """A posted request, between the server and the app."""

    def __init__(self, endpoint: "LevelsEndpoint", scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.endpoint, self.scope = endpoint, scope
        self.path = path_of(scope)
        self.prefills = self.path in PREFILLING
        self.request = HttpRequest()
        self.refusal: str | None = None
        """Error about the request's level; sent instead of the app's answer."""
        self._receive, self._send = receive, send
        self._headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._content_type = self._headers.get(b"content-type", "").strip().lower()
        self._is_form = self._content_type.startswith(FORMS)
        self._ahead: deque[dict[str, Any]] = deque()
        self._chunks: list[bytes] = []
        self._tail = b""
        self._may_hold_ours = self.prefills and endpoint.reads_models
        self._is_read = False
        self._has_begun = False

    async def look_ahead(self) -> None:
        """Inspect a small body in advance, because the app may never read it on a path that does not prefill."""
        length = self._headers.get(b"content-length", "")
        if not (length.isascii() and length.isdigit() and int(length) <= SMALL_BYTES):
            self._is_read = True  # not inspected
            return
        messages = []
        while not self._is_read:
            messages.append(message := await self._next())
            if message["type"] != "http.request":
                break
        self._ahead.extend(messages)

    async def receive(self) -> dict[str, Any]:
        """Return the next message of the request, as ASGI's ``receive`` for the app."""
        return self._ahead.popleft() if self._ahead else await self._next()

    async def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._receive()
        if self._is_read or message["type"] != "http.request":
            return message
        self._take(message.get("body", b""))
        if not message.get("more_body"):
            self._is_read = True
            await self._settle()
        return message

    def _take(self, chunk: bytes) -> None:
        """Store a part of the body, and note whether the body may contain a key of ours or a misspelling of it.

        A body without such a key costs only this test.
        """
        self._chunks.append(chunk)
        if self._may_hold_ours:
            return
        seen = (self._tail + chunk).lower()
        self._tail = chunk[-8:] if len(chunk) >= 8 else (self._tail + chunk)[-8:]
        self._may_hold_ours = any(part.encode() in seen for part in TYPO_PARTS) or (
            # A NUL byte: JSON in UTF-16 or UTF-32, which vLLM also accepts.
            not self._is_form and (b"\0" in seen or ESCAPED_ASCII.search(seen) is not None)
        )

    async def _settle(self) -> None:
        chunks, self._chunks = self._chunks, []
        if not self._may_hold_ours:
            return
        if self._is_form or sum(map(len, chunks)) > SMALL_BYTES:
            settled = await asyncio.to_thread(self._settled, chunks)
        else:
            settled = self._settled(chunks)
        if isinstance(settled, str):
            self.refusal = settled
            raise Refused(400, settled)
        self.request.level = settled

    def _settled(self, chunks: Sequence[bytes]) -> RequestLevel | str | None:
        """Return the level; or why the request is refused."""
        try:
            fields = form_fields(self.scope, chunks) if self._is_form else json_fields(chunks)
            return self.endpoint.settle(self.path, fields)
        except ValueError as error:
            return str(error)

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message of the answer, as ASGI's ``send`` for the app. Answers to refused requests are dropped."""
        if self.refusal is not None:
            return
        self._has_begun = True
        await self._send(message)

    async def refuse(self) -> None:
        """Answer with status 400, in vLLM's error format."""
        if self._has_begun:  # the app has answered before it read the body
            return
        about = {"message": self.refusal, "type": "BadRequestError", "param": "vllm_xargs", "code": 400}
        await JSONResponse({"error": about}, 400)(self.scope, self._receive, self._send)


def json_fields(chunks: Sequence[bytes]) -> dict[str, Any]:
    """Parse a JSON body."""
    body = b"".join(chunks)
    if b"\0" in body[:4]:  # UTF-16 or UTF-32, which vLLM also accepts
        with contextlib.suppress(ValueError):
            body = body.decode(json.detect_encoding(body)).encode()
    # The search is lazy, so that other threads run between two matches.
    ends = (match.start() for match in KEY_END.finditer(body))
    keys = (end for end in ends if body[end - 1 : end] != b"\\")
    if sum(1 for _ in islice(keys, MOST_KEYS + 1)) > MOST_KEYS:
        raise ValueError(
            f"the request: given more than {MOST_KEYS:,} keys, some of which may be {FIELD!r} or a misspelling of it, "
            "expected fewer; put the level into vllm_xargs"
        )
    fields = _parsed(body)
    return fields if isinstance(fields, dict) else {}


def form_fields(scope: dict[str, Any], chunks: Sequence[bytes]) -> dict[str, Any]:
    """Parse a form. This runs a new event loop, so the calling thread must not have a loop."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    parts = iter([*messages, {"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        return next(parts)

    async def read() -> dict[str, Any]:
        async with Request(scope, receive).form() as form:
            return {key: value for key, value in form.items() if isinstance(value, str)}

    try:
        fields = asyncio.run(read())
    except (ClientDisconnect, HTTPException, MultiPartException):
        return {}
    return {key: _parsed(value) if value.lstrip()[:1] == "{" else value for key, value in fields.items()}


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # vLLM reports the error
        return None


class BodyKey(NamedTuple):
    """A key of ours in a body, or a misspelling of it."""

    place: str
    """The path of the container: ``messages[0].vllm_xargs``; empty at the top."""
    key: str
    value: Any


def our_keys(fields: Mapping[str, Any]) -> Iterator[BodyKey]:
    """Find our keys in a body, and keys that look like them, except in JSON schemas."""
    containers: deque[tuple[str, Any]] = deque([("", fields)])
    keys_left, slips_left = MOST_INSPECTED, MOST_SLIPS
    while containers and keys_left > 0:
        place, container = containers.popleft()
        if isinstance(container, dict):
            for key, value in islice(container.items(), keys_left):
                keys_left -= 1
                if key == FIELD:
                    yield BodyKey(place, key, value)
                elif slips_left and any(part in key[:100].lower() for part in TYPO_PARTS):
                    slips_left -= 1
                    if looks_like(key, FIELD):
                        yield BodyKey(place, key, value)
                is_schema = key in SCHEMAS if not place else key == "input" and container.get("type") == "tool_use"
                if isinstance(value, (dict, list)) and not is_schema:
                    shown = key if len(key) <= 40 else f"{key[:37]}..."
                    containers.append((f"{place}.{shown}" if place else shown, value))
            continue
        for i, value in enumerate(islice(container, min(keys_left, MOST_ELEMENTS))):
            keys_left -= 1
            if isinstance(value, (dict, list)):
                containers.append((f"{place}[{i}]", value))


READ_AT = ("vllm_xargs", "sampling_params.extra_args")
"""Places in a body from which vLLM fills a request's ``extra_args``."""


def read_keys(fields: Mapping[str, Any]) -> dict[str, BodyKey]:
    """Read our keys in a body."""
    read: dict[str, BodyKey] = {}
    for body_key in our_keys(fields):
        where = body_key.place or "the request"
        if body_key.key != FIELD:
            raise ValueError(f"{where}: {unexpected(body_key.key, f'the key {FIELD!r} in vllm_xargs')}")
        if body_key.place not in READ_AT:
            hint = ""
            if body_key.place.split(".")[0] == "extra_body":
                hint = " (extra_body is an argument of openai's Python client, which sends its content at the top)"
            expected = "expected it in vllm_xargs, a field at the top of the request"
            raise ValueError(f"{where}: given {body_key.key!r}, {expected}{hint}")
        if body_key.key in read:
            first = read[body_key.key]
            raise ValueError(f"{first.place} {body_key.key}: also given in {where}, expected it in only one place")
        read[body_key.key] = body_key
    return read


class LevelsEndpoint:
    """vLLM endpoint plugin that decides on levels of posted requests; each app of a server process has an instance."""

    name = "sparse_prefill_levels"
    required_tasks = None
    choices: Choices | None = None
    model: str | None = None
    """Served model of requests that do not name a model."""

    def attach_router(self, app: Any) -> None:
        """Add the middleware."""
        app.add_middleware(LevelsMiddleware, endpoint=self)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Compute the levels that requests may choose, if the server runs this backend."""
        config = getattr(engine_client, "vllm_config", None)
        if config is None or not is_selected(config.attention_config):
            return
        choices, served = cached_choices(input_processor_of(engine_client)), served_names(args)
        unknown = [name for name in choices.models if name not in served]
        if unknown and not getattr(args, "enable_lora", False):  # adapters may be loaded later
            raise ConfigurationError(f"{OPTION} {KEY}.requests.models: {not_one_of(unknown[0], served)}")
        self.choices, self.model = choices, next(iter(served), None)

    @property
    def reads_models(self) -> bool:
        """Whether a request's level depends on the model that it names. If so, every body is parsed."""
        return self.choices is not None and bool(self.choices.models)

    def settle(self, path: str, fields: Mapping[str, Any]) -> RequestLevel | None:
        """Decide on the level of a request."""
        assert self.choices is not None
        choice = read_keys(fields).get(FIELD)
        if path not in PREFILLING:
            if choice is not None:
                problem = unexpected(choice.value, "no level")
                raise ValueError(f"{choice.place} {FIELD}: {problem}: POST {path} prefills no prompt; remove it")
            return None
        model = fields.get("model")
        if not isinstance(model, str) or not model:
            model = self.model
        return self.choices.unasked(model) if choice is None else self.choices.permit(choice.value, model)


def served_names(args: Namespace) -> list[str]:
    """Return the names that requests may give as their model."""
    names = getattr(args, "served_model_name", None) or [args.model]
    return [names] if isinstance(names, str) else list(names)
