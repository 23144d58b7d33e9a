# SPDX-License-Identifier: Apache-2.0
"""Where requests come into a server: the middleware that reads a posted body's level.

It looks at a body as the app itself reads it: a request that the app answers without reading the body (no such path, no
authorisation) costs nothing. Only a body in which something may be a key of ours is parsed, a second time, and a long
one in a thread. There the level is settled, by what the body asks for and the model that it names, before anything of
an answer is sent, and goes along with all that the engine is asked for its sake (``requests.HTTP_REQUEST``).
"""

import asyncio
import contextlib
import json
import re
import secrets
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
from vllm_sparse_backend.config.request_levels import FIELD, REPORT, Choices, RequestLevel, Ticket, asks_report
from vllm_sparse_backend.config.settings import KEY, OPTION
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.frontend.engine_rpc import path_of
from vllm_sparse_backend.serving.frontend.prefill_reports import ANSWERED, Reporting
from vllm_sparse_backend.serving.level_policy import HTTP_REQUEST, HttpRequest, choices_at, front_of
from vllm_sparse_backend.serving.registration import is_ours

PREFILLING = {
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages",
    "/cohere/v2/chat", "/generative_scoring", "/v1/systemone", "/inference/v1/generate", "/invocations",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/completions/render", "/v1/chat/completions/render",
    "/v1/messages/render",
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
    "/v2/rerank",
}  # fmt: skip
"""Paths of vLLM's that have prompts prefilled, or make of a body what another path will. One that a release adds
refuses levels until it stands here."""

FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")

SMALL_BYTES = 1 << 16
"""Bodies up to here are parsed on the event loop. On paths that prefill nothing longer ones are not looked at."""

MOST_KEYS = 200_000
"""A body of more keys, of which some may be ours, is refused unparsed: the parser would hold up the event loop."""
KEY_END = re.compile(rb'"[ \t\r\n]*:')
"""The end of a key, unless a backslash stands before it: then it is a quote within a string."""
MOST_LOOKED_AT = 250_000
"""Keys and elements of a body that are looked at, the outermost first."""
MOST_ELEMENTS = 10_000
"""Of each list. Prompts are long lists of numbers."""
MOST_SLIPS = 100
"""Keys of a body that are compared with ours in full."""

SCHEMAS = {"tools", "functions", "response_format", "structured_outputs", "text", "guided_json"}
"""Fields that hold JSON schemas, in which users name what they like: they are not looked into, nor are the arguments of
tools' calls in a conversation."""

ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")
"""In JSON any letter of a key may be written so."""


class Refused(HTTPException):
    """Raised where the app reads a body, so that it goes no further. FastAPI lets exceptions of this class through."""


class LevelsMiddleware:
    """ASGI middleware, inside of vLLM's own, which has looked at keys of access before."""

    def __init__(self, app: Any, desk: "LevelsEndpoint") -> None:
        self.app = app
        self.desk = desk

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if self.desk.choices is None or scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        post = Post(self.desk, scope, receive, send)
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
    """One posted request, between the server and the app.

    Args:
        desk: what decides on levels.
        scope: ASGI's, of the request.
        receive: the server's; yields the parts of the body.
        send: the server's; takes the answer.
    """

    def __init__(self, desk: "LevelsEndpoint", scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.desk, self.scope = desk, scope
        self.path = path_of(scope)
        self.prefills = self.path in PREFILLING
        self.request = HttpRequest()
        self.refusal: str | None = None
        """What is wrong with the request's level. It is answered in the app's place."""
        self._receive, self._send = receive, send
        self._headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._content_type = self._headers.get(b"content-type", "").strip().lower()
        self._is_form = self._content_type.startswith(FORMS)
        self._ahead: deque[dict[str, Any]] = deque()
        self._chunks: list[bytes] = []
        self._tail = b""
        self._may_hold_ours = self.prefills and desk.reads_models
        self._is_read = False
        self._has_begun = False

    async def look_ahead(self) -> None:
        """Look at a small body before the app does, which on a path that prefills nothing may never do so."""
        length = self._headers.get(b"content-length", "")
        if not (length.isascii() and length.isdigit() and int(length) <= SMALL_BYTES):
            self._is_read = True  # not looked at
            return
        messages = []
        while not self._is_read:
            messages.append(message := await self._next())
            if message["type"] != "http.request":
                break
        self._ahead.extend(messages)

    async def receive(self) -> dict[str, Any]:
        """For the app: the next message of the request. Raises Refused at the end of a body that is not to be had."""
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
        """Keep a part of the body, and note whether a key of ours, or a slip of one, may be in what has come so far.

        Without a key in it, this test is all that a body costs.
        """
        self._chunks.append(chunk)
        if self._may_hold_ours:
            return
        seen = (self._tail + chunk).lower()
        self._tail = chunk[-8:] if len(chunk) >= 8 else (self._tail + chunk)[-8:]
        self._may_hold_ours = any(part.encode() in seen for part in TYPO_PARTS) or (
            # A NUL byte: JSON in UTF-16 or UTF-32, which vLLM takes as well.
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
        self.request.level, reports = settled
        if reports and self.path in ANSWERED:
            self.request.ticket = Ticket(secrets.token_hex(16))

    def _settled(self, chunks: Sequence[bytes]) -> tuple[RequestLevel | None, bool] | str:
        """The level and whether a report is wanted; or why the request is refused."""
        try:
            fields = form_fields(self.scope, chunks) if self._is_form else json_fields(chunks)
            return self.desk.settle(self.path, fields)
        except ValueError as error:
            return str(error)

    async def send(self, message: dict[str, Any]) -> None:
        """For the app: a message of the answer, which is not sent where the request is refused."""
        if self.refusal is not None:
            return
        if self.request.ticket is not None and message["type"] == "http.response.start":
            self._send = Reporting(self._send, self.desk.client, self.request.ticket)
        self._has_begun = True
        await self._send(message)

    async def refuse(self) -> None:
        """Answer with status 400, in vLLM's form of an error."""
        if self._has_begun:  # an app that answers before it has read the body has its say
            return
        about = {"message": self.refusal, "type": "BadRequestError", "param": "vllm_xargs", "code": 400}
        await JSONResponse({"error": about}, 400)(self.scope, self._receive, self._send)


def json_fields(chunks: Sequence[bytes]) -> dict[str, Any]:
    """The fields of a JSON object; none of what is none, which vLLM itself refuses.

    Raises:
        ValueError: it has too many keys.
    """
    body = b"".join(chunks)
    if b"\0" in body[:4]:  # UTF-16 or UTF-32, as vLLM takes it
        with contextlib.suppress(ValueError):
            body = body.decode(json.detect_encoding(body)).encode()
    # One by one: between two of them other threads may run.
    ends = (match.start() for match in KEY_END.finditer(body))
    keys = (end for end in ends if body[end - 1 : end] != b"\\")
    if sum(1 for _ in islice(keys, MOST_KEYS + 1)) > MOST_KEYS:
        raise ValueError(
            f"the request: given more than {MOST_KEYS:,} keys, of which some may be {FIELD!r} or a slip of it, "
            "expected fewer; a level stands in vllm_xargs"
        )
    fields = _parsed(body)
    return fields if isinstance(fields, dict) else {}


def form_fields(scope: dict[str, Any], chunks: Sequence[bytes]) -> dict[str, Any]:
    """The text fields of a form, parsed where they hold JSON; none of what is no form.

    It runs an event loop of its own, in a thread that has none.
    """
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
    except (ValueError, RecursionError):  # vLLM says what is wrong with it
        return None


class Found(NamedTuple):
    """A key of ours in a body, or one that looks like it."""

    place: str
    """The fields that lead to what holds it: ``messages[0].vllm_xargs``; empty at the top."""
    key: str
    value: Any


def keys_of_ours(fields: Mapping[str, Any]) -> Iterator[Found]:
    """Our keys in a body and such as look like them, the outermost first, but for schemas; of the first keys alone."""
    held: deque[tuple[str, Any]] = deque([("", fields)])
    keys_left, slips_left = MOST_LOOKED_AT, MOST_SLIPS
    while held and keys_left > 0:
        place, container = held.popleft()
        if isinstance(container, dict):
            for key, value in islice(container.items(), keys_left):
                keys_left -= 1
                if key in (FIELD, REPORT):
                    yield Found(place, key, value)
                elif slips_left and any(part in key[:100].lower() for part in TYPO_PARTS):
                    slips_left -= 1
                    if looks_like(key, FIELD):
                        yield Found(place, key, value)
                is_users_own = key in SCHEMAS if not place else key == "input" and container.get("type") == "tool_use"
                if isinstance(value, (dict, list)) and not is_users_own:
                    shown = key if len(key) <= 40 else f"{key[:37]}..."
                    held.append((f"{place}.{shown}" if place else shown, value))
            continue
        for i, value in enumerate(islice(container, min(keys_left, MOST_ELEMENTS))):
            keys_left -= 1
            if isinstance(value, (dict, list)):
                held.append((f"{place}[{i}]", value))


READ_AT = ("vllm_xargs", "sampling_params.extra_args")
"""Where vLLM reads what becomes of a request's ``extra_args``."""


def read_keys(fields: Mapping[str, Any]) -> dict[str, Found]:
    """Our keys in a body, by their names.

    Raises:
        ValueError: one stands where nobody reads it, stands twice, or only looks like ours.
    """
    read: dict[str, Found] = {}
    for found in keys_of_ours(fields):
        where = found.place or "the request"
        if found.key not in (FIELD, REPORT):
            raise ValueError(f"{where}: {unexpected(found.key, f'the key {FIELD!r} in vllm_xargs')}")
        if found.place not in READ_AT:
            hint = ""
            if found.place.split(".")[0] == "extra_body":
                hint = " (extra_body is an argument of openai's Python client, which sends what is in it without it)"
            expected = "expected it in vllm_xargs, a field at the top of the request"
            raise ValueError(f"{where}: given {found.key!r} there, {expected}{hint}")
        if found.key in read:
            raise ValueError(f"{read[found.key].place} {found.key}: given in {where} too, expected it in one place")
        read[found.key] = found
    return read


class LevelsEndpoint:
    """An endpoint plugin as vLLM defines it, of each app that a server process builds."""

    name = "sparse_prefill_levels"
    required_tasks = None
    choices: Choices | None = None
    model: str | None = None
    """What a request is for that names none."""
    client: Any = None
    is_silent = False
    """Whether no report can be had: requests carry no wish for one, or workers do not know whose rows are whose."""

    def attach_router(self, app: Any) -> None:
        app.add_middleware(LevelsMiddleware, desk=self)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        config = getattr(engine_client, "vllm_config", None)
        if config is None or not is_ours(config.attention_config.backend):
            return
        choices, served = choices_at(front_of(engine_client)), served_names(args)
        unknown = [name for name in choices.models if name not in served]
        if unknown and not getattr(args, "enable_lora", False):  # whose adapters may be loaded later
            raise ConfigurationError(f"{OPTION} {KEY}.requests.models: {not_one_of(unknown[0], served)}")
        self.choices, self.model = choices, next(iter(served), None)
        self.client = engine_client
        self.is_silent = compat.pools(config) or config.parallel_config.use_ubatching

    @property
    def reads_models(self) -> bool:
        """Whether the level of a request depends on the model that it names: then each body is parsed for that."""
        return self.choices is not None and bool(self.choices.models)

    def settle(self, path: str, fields: Mapping[str, Any]) -> tuple[RequestLevel | None, bool]:
        """Decide on a request with this body.

        Returns:
            Its level, None on paths that prefill nothing; and whether it wants a report.

        Raises:
            ValueError: it may not have that level or a report, or a key of ours stands in a wrong place.
        """
        assert self.choices is not None
        read = read_keys(fields)
        report = self._wants_report(path, read.get(REPORT), fields)
        asked = read.get(FIELD)
        if path not in PREFILLING:
            if asked is not None:
                given = unexpected(asked.value, "no level")
                raise ValueError(f"{asked.place} {FIELD}: {given}, as POST {path} prefills nothing; leave it out")
            return None, report
        model = fields.get("model")
        if not isinstance(model, str) or not model:
            model = self.model
        level = self.choices.unasked(model) if asked is None else self.choices.permit(asked.value, model)
        return level, report

    def _wants_report(self, path: str, asked: Found | None, fields: Mapping[str, Any]) -> bool:
        if asked is None or not asks_report({REPORT: asked.value}):
            return False
        if path not in PREFILLING or self.is_silent or fields.get("use_beam_search"):
            raise ValueError(f"{asked.place} {REPORT}: given, but nothing reports on such a request; leave it out")
        return True


def served_names(args: Namespace) -> list[str]:
    """What requests may give as their model, the usual one first."""
    names = getattr(args, "served_model_name", None) or [args.model]
    return [names] if isinstance(names, str) else list(names)
