# SPDX-License-Identifier: Apache-2.0
"""How one request was prefilled, for those that ask by ``sparse_prefill_report``: tallied by workers, told in answers.

Each worker keeps a tally for such a request, and logs it when the request ends. Where an answer is a JSON object with
an id, or a stream of such (``ANSWERED``), the server asks its workers for what they have of that id, and puts it into
the body, or into the last chunk before the stream's end. A request that asks for none costs nothing.
"""

import asyncio
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.batch import BatchRow
from vllm_sparse_backend.serving.stats import DENSE, SPARSE
from vllm_sparse_backend.settings.metrics import REPORT_METHOD
from vllm_sparse_backend.settings.requests import REPORT, split
from vllm_sparse_kernels import Rows, SparseIndex
from vllm_sparse_kernels.index import causal_pairs

logger = logging.getLogger(LOGGER)

ANSWERED = {"/v1/completions", "/v1/chat/completions"}
"""Paths whose answers bear the id by which the engine knows the request. What comes by others is in the log alone."""

MOST_KEPT = 1024
"""Tallies of a worker: of more requests than that, the oldest are forgotten."""

TIMEOUT_S = 10.0


@dataclass
class Tally:
    """What this worker saw of a request: tokens by the way they went, and pairs of its own layers and heads."""

    level: str
    dense_tokens: int = 0
    sparse_tokens: int = 0
    causal_pairs: int = 0
    masked_pairs: int = 0
    listed_pairs: torch.Tensor | None = None  # a scalar on the device

    def add_tokens(self, row: BatchRow) -> None:
        dense = row.dense_end - row.token
        if row.kind.path in (DENSE, SPARSE):
            self.dense_tokens += dense
            self.sparse_tokens += row.query_len - dense

    def add_pairs(self, index: SparseIndex, row: int) -> None:
        """Those of one row of an index. Stays on the device."""
        rows = index.rows
        table = rows.block_table[row : row + 1]
        alone = Rows((0,), rows.query_lens[row : row + 1], rows.context_lens[row : row + 1], table)
        tiles = [i for i, tile in enumerate(rows.tile_list) if tile.row == row]
        listed = index.listed_pairs()[:, tiles[0] : tiles[-1] + 1].sum()
        self.listed_pairs = listed if self.listed_pairs is None else self.listed_pairs + listed
        self.masked_pairs += index.num_heads * alone.masked_pairs(index.block_tokens)
        self.causal_pairs += index.num_heads * causal_pairs(alone)

    @property
    def kept_pairs(self) -> int:
        """Waits for the device: to be asked for once the request has been prefilled."""
        return 0 if self.listed_pairs is None else int(self.listed_pairs) - self.masked_pairs


TALLIES: "OrderedDict[str, Tally]" = OrderedDict()
"""Of this process's worker, by the engine's request id, the oldest first."""

Spans = Sequence[tuple[int, int, Tally]]
"""(first, end) of a request's sparse tokens in the step, and its tally."""


def begin(req_id: str, level: str) -> None:
    TALLIES[req_id] = Tally(split(level)[0])
    if len(TALLIES) > MOST_KEPT:
        TALLIES.popitem(last=False)


def end(req_id: str) -> None:
    tally = TALLIES.get(req_id)
    if tally is not None and tally.dense_tokens + tally.sparse_tokens:
        kept = f", {tally.kept_pairs / tally.causal_pairs:.3f} of their pairs kept" if tally.causal_pairs else ""
        logger.info(
            "sparse-prefill: request %s, level %s: %d tokens prefilled dense, %d sparse%s",
            req_id, tally.level, tally.dense_tokens, tally.sparse_tokens, kept,
        )  # fmt: skip


def spans_of(rows: Sequence[BatchRow], req_ids: Sequence[str], count_tokens: bool) -> Spans:
    """Where pairs of the step belong to a tally; and tokens are added, by the one builder of a worker that does so."""
    found = [(row, tally) for row, req_id in zip(rows, req_ids) if (tally := TALLIES.get(req_id)) is not None]
    for row, tally in found if count_tokens else ():
        tally.add_tokens(row)
    return [(row.dense_end, row.end, tally) for row, tally in found if row.is_sparse]


def add_pairs(spans: Spans, index: SparseIndex) -> None:
    for row, token in enumerate(index.rows.tokens):
        for first, past, tally in spans:
            if first <= token < past:
                tally.add_pairs(index, row)


def about(answer_id: str) -> list[dict[str, Any]]:
    """What this worker has of an answer's requests: one for each prompt and choice. Of things that msgpack knows."""
    mine = re.compile(rf"(\d+_)?{re.escape(answer_id)}(-.*)?")
    found = [tally for req_id, tally in TALLIES.items() if mine.fullmatch(req_id)]
    return [
        {
            "level": one.level, "dense_tokens": one.dense_tokens, "sparse_tokens": one.sparse_tokens,
            "kept_pairs": one.kept_pairs, "causal_pairs": one.causal_pairs,
        } for one in found
    ]  # fmt: skip


# --- in a server's process ---


async def report(client: Any, answer_id: str) -> dict[str, Any] | None:
    """All workers' tallies of an answer as one: what its prompts had together. None where nobody has any."""
    from vllm_sparse_backend.serving.metrics_page import engines_of

    asks = [ask(answer_id) for ask in engines_of(client, REPORT_METHOD).values()]
    try:
        engines = await asyncio.wait_for(asyncio.gather(*asks), TIMEOUT_S)
    except Exception as error:  # whatever it is, the answer itself is not to go with it
        logger.warning("sparse-prefill: no report of %s: %s: %s", answer_id, type(error).__name__, error)
        return None
    return merged([worker for workers in engines for worker in workers])


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
    """An app's ``send`` that puts the report into the answer: a JSON object, or the last event before [DONE]."""

    def __init__(self, send: Any, client: Any) -> None:
        self.send, self.client = send, client
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
        body = await self._with_report(self.held)
        headers = [(name, value) for name, value in self.start["headers"] if name.lower() != b"content-length"]
        await self.send({**self.start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self.send({"type": "http.response.body", "body": body})

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
            answer_id = answer["id"]
        except (ValueError, KeyError, TypeError):
            return body
        return json.dumps({**answer, REPORT: await report(self.client, answer_id)}, ensure_ascii=False).encode()
