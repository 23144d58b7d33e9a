# SPDX-License-Identifier: Apache-2.0
"""POST /v1/sparse_prefill/switch: makes all new requests exact, or undoes that, without a restart of the server.

The route exists if the settings allow it. The answer waits for the cores of all data-parallel engines
(``core/exact_switch.py``).
"""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from vllm_sparse_backend.config.errors import unexpected
from vllm_sparse_backend.config.metrics import SWITCH_METHOD
from vllm_sparse_backend.config.profile import EXACT, ON
from vllm_sparse_backend.config.request_levels import FIELD
from vllm_sparse_backend.serving.frontend.engine_rpc import call_engines

TIMEOUT_S = 60.0
"""Seconds to wait for an engine: its core answers between two steps."""


class SwitchEndpoint:
    """Answers requests to ``SWITCH_PATH``."""

    def __init__(self, engine_client: Any) -> None:
        self.engine_client = engine_client

    async def answer(self, request: Request) -> JSONResponse:
        """Switch all engines."""
        try:
            body = json.loads(await request.body())
        except ValueError:
            body = None
        if body not in ({"to": EXACT}, {"to": ON}):
            return _error(400, unexpected(body, f'{{"to": "{EXACT}"}} or {{"to": "{ON}"}}'))
        answers, failed = await call_engines(self.engine_client, SWITCH_METHOD, body["to"], timeout_s=TIMEOUT_S)
        refused = {engine: answer[0] for engine, answer in answers.items() if answer[0]}
        if problems := "; ".join(f"engine {engine}: {why}" for engine, why in sorted({**failed, **refused}.items())):
            return _error(504 if failed else 409, f"{problems}{'; try again' if failed else ''}")
        return JSONResponse({FIELD: body["to"]})


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": f"sparse-prefill: {message}", "code": status}}, status)
