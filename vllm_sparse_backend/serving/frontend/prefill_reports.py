# SPDX-License-Identifier: Apache-2.0
"""Adds a report on a request's prefill to its answer, for requests with ``sparse_prefill_report``.

The API server draws a random ticket for such an HTTP request and passes it on with all of its engine requests. Each
worker keeps a tally by ticket (``worker/request_tallies.py``). If the answer is a JSON object with an id, or a stream
of such objects (``ANSWERED``), the server calls its workers for the ticket's tallies, and adds the report to the body
or to the last chunk before the stream's end. Clients do not know each other's tickets, so they cannot read each
other's reports. A request without the key costs nothing.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_sparse_backend.config.metrics import REPORT_METHOD
from vllm_sparse_backend.config.request_levels import REPORT, Ticket
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.frontend.engine_rpc import call_engines, send_with_body

logger = logging.getLogger(LOGGER)

ANSWERED = {"/v1/completions", "/v1/chat/completions"}
"""Paths whose answers are a JSON object or a stream of objects. Reports for other paths appear only in the log."""

TIMEOUT_S = 10.0
"""Seconds to wait for the workers' tallies."""


def plain_ticket(extra_args: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a request's ``extra_args`` in the form in which other processes receive them."""
    if not extra_args or not extra_args.get(REPORT):
        return extra_args
    value = extra_args[REPORT]
    return {**extra_args, REPORT: str(value) if isinstance(value, Ticket) else True}


async def build_report(client: Any, ticket: str) -> dict[str, Any] | None:
    """Build the report of an HTTP request from all workers' tallies."""
    engines, failed = await call_engines(client, REPORT_METHOD, ticket, timeout_s=TIMEOUT_S)
    for engine, why in failed.items():  # the answer itself must not fail
        logger.warning("sparse-prefill: no report from engine %s: %s", engine, why)
    return None if failed else merged([worker for workers in engines.values() for worker in workers])


def merged(workers: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Merge the tallies of all workers. Ranks divide heads and stages divide layers, so pairs add up but tokens do not."""
    tallies = [tally for worker in workers for tally in worker]
    if not tallies:
        return None
    tokens = {
        name: max(sum(tally[name] for tally in worker) for worker in workers)
        for name in ("dense_tokens", "sparse_tokens")
    }
    kept, causal = (sum(tally[name] for tally in tallies) for name in ("kept_pairs", "causal_pairs"))
    return {
        "level": tallies[0]["level"],
        **tokens,
        "share_kept": kept / causal if causal else None,
    }


class Reporting:
    """ASGI ``send`` for an app that adds the report to the answer's JSON object, or to the last event of a stream."""

    def __init__(self, send: Any, client: Any, ticket: Ticket) -> None:
        self.send, self.client, self.ticket = send, client, ticket
        self.start: dict[str, Any] = {}
        self.streams = False
        self.held = b""

    async def __call__(self, message: dict[str, Any]) -> None:
        if message["type"] != "http.response.start":
            await (self._event if self.streams else self._part)(message)
            return
        headers = dict(message["headers"])
        self.start, self.streams = message, headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if self.streams:
            await self.send(message)

    async def _part(self, message: dict[str, Any]) -> None:
        self.held += message.get("body", b"")
        if message.get("more_body"):
            return
        await send_with_body(self.send, self.start, await self._with_report(self.held))

    async def _event(self, message: dict[str, Any]) -> None:
        """Hold back each event (one message) until the next event shows whether it was the last."""
        body, before = message.get("body", b""), self.held
        if body.startswith(b"data: [DONE]"):
            before = b"data: " + await self._with_report(before.removeprefix(b"data: ")) + b"\n\n" if before else b""
        self.held = body if body.startswith(b"data: {") else b""
        if before:
            await self.send({"type": "http.response.body", "body": before, "more_body": True})
        if not self.held:
            await self.send(message)

    async def _with_report(self, body: bytes) -> bytes:
        """Add the report to an answer; errors and other bodies without an id stay as they are."""
        try:
            answer = json.loads(body)
        except ValueError:
            return body
        if not isinstance(answer, dict) or "id" not in answer:
            return body
        return json.dumps(
            {**answer, REPORT: await build_report(self.client, str(self.ticket))}, ensure_ascii=False
        ).encode()
