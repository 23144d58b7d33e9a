# SPDX-License-Identifier: Apache-2.0
"""How one request was prefilled, for those that ask by ``sparse_prefill_report``, in its answer.

The server's process draws a ticket for such an HTTP request, which goes along with all that the engine is asked for its
sake. Each worker keeps a tally for these (``tallies.py``). Where an answer is a JSON object with an id, or a stream of
such (``ANSWERED``), the server asks its workers for what they have under the ticket, and puts it into the body, or into
the last chunk before the stream's end. Nobody else knows the ticket, so nobody reads another's report. A request that
asks for none costs nothing.
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
"""Paths whose answers are one JSON object, or a stream of such. What comes by others is in the log alone."""

TIMEOUT_S = 10.0


def plain_ticket(extra_args: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a request's ``extra_args`` as they travel to other processes.

    Args:
        extra_args: the request's, in which the middleware's ``Ticket`` or true asks for a report.

    Returns:
        The same, with a ticket as plain text, and true for whatever else asks for a report: that one is in the log.
    """
    if not extra_args or not extra_args.get(REPORT):
        return extra_args
    value = extra_args[REPORT]
    return {**extra_args, REPORT: str(value) if isinstance(value, Ticket) else True}


async def report(client: Any, ticket: str) -> dict[str, Any] | None:
    """All workers' tallies of an HTTP request as one: what its prompts had together. None where there are none."""
    engines, failed = await call_engines(client, REPORT_METHOD, ticket, timeout_s=TIMEOUT_S)
    for engine, why in failed.items():  # the answer itself is not to go with it
        logger.warning("sparse-prefill: no report from engine %s: %s", engine, why)
    return None if failed else merged([worker for workers in engines.values() for worker in workers])


def merged(workers: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Ranks share a layer's heads, and stages layers: pairs add up; tokens are what one of them counted."""
    tallies = [tally for worker in workers for tally in worker]
    if not tallies:
        return None
    tokens = {
        name: max(sum(tally[name] for tally in worker) for worker in workers)
        for name in ("dense_tokens", "sparse_tokens")
    }
    kept, causal = (sum(tally[name] for tally in tallies) for name in ("kept_pairs", "causal_pairs"))
    return {"level": tallies[0]["level"], **tokens, "share_kept": kept / causal if causal else None}


class Reporting:
    """An app's ``send`` that puts the report into the answer: a JSON object, or the last event before [DONE].

    Args:
        send: ASGI's, which takes the answer.
        client: the engine client, whose workers count.
        ticket: under which they count for this request.
    """

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
        """Events come one in a message; each waits for the next, as it may be the last."""
        body, before = message.get("body", b""), self.held
        if body.startswith(b"data: [DONE]"):
            before = b"data: " + await self._with_report(before.removeprefix(b"data: ")) + b"\n\n" if before else b""
        self.held = body if body.startswith(b"data: {") else b""
        if before:
            await self.send({"type": "http.response.body", "body": before, "more_body": True})
        if not self.held:
            await self.send(message)

    async def _with_report(self, body: bytes) -> bytes:
        """What is no answer of a request, as an error is not, stays as it is."""
        try:
            answer = json.loads(body)
        except ValueError:
            return body
        if not isinstance(answer, dict) or "id" not in answer:
            return body
        return json.dumps({**answer, REPORT: await report(self.client, str(self.ticket))}, ensure_ascii=False).encode()
