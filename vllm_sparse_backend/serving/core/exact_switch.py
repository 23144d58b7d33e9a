# SPDX-License-Identifier: Apache-2.0
"""Exact for all new requests, and back, without a restart: POST /v1/sparse_prefill/switch, where the settings allow it.

The engine's core decides, as it takes requests in: it is one process, whichever of the server's processes a request or
the switch came through, and every rank and pipeline stage learns a request's level from it. Of several data-parallel
engines all are told, and the answer waits for them.
"""

import json
import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from vllm_sparse_backend.config.errors import unexpected
from vllm_sparse_backend.config.metrics import SWITCH_METHOD
from vllm_sparse_backend.config.profile import EXACT, ON
from vllm_sparse_backend.config.request_levels import FIELD, Mark, RequestLevel
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.frontend.engine_rpc import answers_of, engines_of
from vllm_sparse_backend.serving.level_policy import choices

logger = logging.getLogger(LOGGER)

TIMEOUT_S = 60.0

MARK = "sparse_prefill_switched"
"""Attribute of the engine's core: what all new requests get; absent or None where they get what they ask for."""


def turn(core: Any, to: str) -> str:
    """In the core: from now on. Returns why it can't be, or nothing."""
    found = choices(core.vllm_config)
    if to == EXACT and found.refusal is not None:
        return found.refusal
    mark = found.mark(RequestLevel(EXACT)) if to == EXACT else None
    setattr(core, MARK, mark)
    logger.warning("sparse-prefill: switched: all new requests %s", "are exact" if mark else "have what they ask for")
    return ""


def apply(core: Any, request: Any) -> None:
    """In the core: give a request that comes in what the switch says."""
    mark: Mark | None = getattr(core, MARK, None)
    if mark is not None and request.sampling_params is not None:
        request.sampling_params.extra_args = mark.write(request.sampling_params.extra_args)


def is_exact(core: Any) -> bool:
    return getattr(core, MARK, None) is not None


class Switch:
    """In a server's process: what answers to ``SWITCH_PATH``."""

    def __init__(self, client: Any) -> None:
        self.client = client

    async def answer(self, request: Request) -> JSONResponse:
        try:
            given = json.loads(await request.body())
        except ValueError:
            given = None
        if given not in ({"to": EXACT}, {"to": ON}):
            return _error(400, unexpected(given, f'{{"to": "{EXACT}"}} or {{"to": "{ON}"}}'))
        asks = engines_of(self.client, SWITCH_METHOD)
        answers, failed = await answers_of({engine: ask(given["to"]) for engine, ask in asks.items()}, TIMEOUT_S)
        refused = {engine: answer[0] for engine, answer in answers.items() if answer[0]}
        if wrong := "; ".join(f"engine {engine}: {why}" for engine, why in sorted({**failed, **refused}.items())):
            return _error(504 if failed else 409, f"{wrong}{'; ask again' if failed else ''}")
        return JSONResponse({FIELD: given["to"]})


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": f"sparse-prefill: {message}", "code": status}}, status)
