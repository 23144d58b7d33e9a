# SPDX-License-Identifier: Apache-2.0
"""Where requests come into a server: each body that is posted is read for a level, whatever path it is posted to.

On paths that prefill prompts the level is settled here, by what the body asks for and the model that it names, and goes
along with all that the engine is asked for its sake (``requests.ASKED``). Other paths refuse one. So does every path a
key that only looks like ours, or stands in a place that vLLM does not read, before anything of an answer is sent.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from vllm_sparse_backend.identity import is_ours
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.asking import path_of
from vllm_sparse_backend.serving.reports import ANSWERED, Reporting
from vllm_sparse_backend.serving.requests import ASKED, choices_at, front_of
from vllm_sparse_backend.settings.config import KEY, OPTION
from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of
from vllm_sparse_backend.settings.requests import FIELD, REPORT, Choices, Granted, asks_report, refuse_slips

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

FORMS = (b"multipart/form-data", b"application/x-www-form-urlencoded")


class LevelsMiddleware:
    """ASGI middleware, inside of vLLM's own, which has looked at keys of access before."""

    def __init__(self, app: Any, desk: "LevelsEndpoint") -> None:
        self.app = app
        self.desk = desk

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if self.desk.choices is None or scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        path = path_of(scope)
        try:
            fields = await fields_of(scope, messages)
            ASKED.set(self.desk.grant(path, fields))
            if self.desk.reports(path, fields) and path in ANSWERED:
                send = Reporting(send, self.desk.client)
        except ValueError as error:
            about = {"message": str(error), "type": "BadRequestError", "param": "vllm_xargs", "code": 400}
            await JSONResponse({"error": about}, 400)(scope, receive, send)
        else:
            await self.app(scope, _again(messages, receive), send)


async def fields_of(scope: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a JSON object or a form; none of what is neither, and not for this backend to complain of."""
    if dict(scope["headers"]).get(b"content-type", b"").startswith(FORMS):
        try:
            form = await Request(scope, _again(messages, None)).form()
        except (ClientDisconnect, HTTPException, MultiPartException):
            return {}
        fields: Any = {key: value for key, value in form.items() if isinstance(value, str)}
        fields["vllm_xargs"] = _parsed(fields.get("vllm_xargs", ""))
    else:
        fields = _parsed(b"".join(message.get("body", b"") for message in messages))
    return fields if isinstance(fields, dict) else {}


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # vLLM says what is wrong with it
        return None


def _again(messages: list[dict[str, Any]], receive: Any) -> Any:
    """What an app asks for its request's messages: those that have been read, then those to come."""
    read = iter(messages)

    async def next_message() -> Any:
        return next(read, None) or await receive()

    return next_message


def levels_in(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(place, value) of all levels in a body. Raises ValueError where a key is not quite ours, or out of place."""
    sampling = fields.get("sampling_params")
    places = {
        "the request": fields,
        "extra_body": fields.get("extra_body"),
        "extra_args": fields.get("extra_args"),
        "sampling_params": sampling,
        "vllm_xargs": fields.get("vllm_xargs"),
        "sampling_params.extra_args": sampling.get("extra_args") if isinstance(sampling, dict) else None,
    }
    for place, held in places.items():
        if not isinstance(held, dict):
            continue
        refuse_slips(place, held)
        if FIELD in held:
            if not place.endswith(("vllm_xargs", "sampling_params.extra_args")):
                raise ValueError(f"{place}: given {FIELD!r} there, expected it in vllm_xargs")
            yield place, held[FIELD]


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

    def grant(self, path: str, fields: Mapping[str, Any]) -> Granted:
        """The level of a request with this body. Raises ValueError where it may not have it."""
        assert self.choices is not None
        model = str(fields.get("model") or self.model)
        found = list(levels_in(fields))
        if not found:
            return self.choices.grant({}, model)
        place, given = found[0]
        if path not in PREFILLING:
            raise ValueError(f"{place} {FIELD}: given {given!r}, but POST {path} prefills nothing; leave it out")
        if len(found) > 1:
            raise ValueError(f"{place} {FIELD}: given in {found[1][0]} too, expected it in one place")
        return self.choices.grant({FIELD: given}, model)

    def reports(self, path: str, fields: Mapping[str, Any]) -> bool:
        """Whether a request wants to know how it was prefilled. Raises ValueError where nothing will tell it."""
        given = fields.get("vllm_xargs")
        if not isinstance(given, dict) or not asks_report(given):
            return False
        if path not in PREFILLING or self.is_silent or fields.get("use_beam_search"):
            raise ValueError(f"vllm_xargs {REPORT}: given, but nothing reports on such a request; leave it out")
        return True


def served_names(args: Namespace) -> list[str]:
    """What requests may give as their model, the usual one first."""
    names = getattr(args, "served_model_name", None) or [args.model]
    return [names] if isinstance(names, str) else list(names)
