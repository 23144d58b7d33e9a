# SPDX-License-Identifier: Apache-2.0
"""What a worker saw of the requests that ask how they are prefilled: a tally each, told in its log when they end."""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_sparse_backend.config.request_levels import REPORT
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.worker.batch_rows import BatchRow
from vllm_sparse_backend.serving.worker.counters import DENSE, SPARSE
from vllm_sparse_kernels import Rows, SparseIndex
from vllm_sparse_kernels.index import causal_pairs

logger = logging.getLogger(LOGGER)

MOST_KEPT = 1024
"""Tallies of a worker: of more requests than that, the oldest are forgotten."""


@dataclass
class Tally:
    """What this worker saw of a request: tokens by the way they went, and pairs of its own layers and heads."""

    level: str
    ticket: str = ""
    """Of the HTTP request that gets the report, as the server's process drew it; empty where only the log tells it."""
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


def ticket_in(extra_args: Mapping[str, object]) -> str | None:
    """The ticket in a request's ``extra_args``, empty where it has none; None where it asks for no report."""
    value = extra_args.get(REPORT)
    if isinstance(value, str):
        return value
    return "" if value else None


def begin(req_id: str, level: str, ticket: str = "") -> None:
    TALLIES[req_id] = Tally(level, ticket)
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


def spans_of(rows: Sequence[BatchRow], req_ids: Sequence[str | None], count_tokens: bool) -> Spans:
    """Where pairs of the step belong to a tally; and tokens are added, by the one builder of a worker that does so."""
    found = [(row, tally) for row, req_id in zip(rows, req_ids) if (tally := TALLIES.get(req_id or "")) is not None]
    for row, tally in found if count_tokens else ():
        tally.add_tokens(row)
    return [(row.dense_end, row.end, tally) for row, tally in found if row.is_sparse]


def add_pairs(spans: Spans, index: SparseIndex) -> None:
    for row, token in enumerate(index.rows.tokens):
        for first, past, tally in spans:
            if first <= token < past:
                tally.add_pairs(index, row)


def about(ticket: str) -> list[dict[str, Any]]:
    """What this worker has of the requests with this ticket, one for each prompt and choice of an HTTP request.

    Of things that msgpack knows. Ids are not looked at: clients choose them, and may choose those of others.
    """
    tallies = [tally for tally in TALLIES.values() if ticket and tally.ticket == ticket]
    return [
        {
            "level": tally.level, "dense_tokens": tally.dense_tokens, "sparse_tokens": tally.sparse_tokens,
            "kept_pairs": tally.kept_pairs, "causal_pairs": tally.causal_pairs,
        } for tally in tallies
    ]  # fmt: skip
