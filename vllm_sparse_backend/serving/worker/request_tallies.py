# SPDX-License-Identifier: Apache-2.0
"""Tallies of requests that ask for a report on their prefill. A worker logs each tally after its request has ended.

Pairs are counted on the device. When a request ends, they are copied to the host asynchronously, and a later step logs
the tally: a step never waits for the device.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_sparse_backend.config.request_levels import REPORT
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.worker.batch_rows import BatchRow
from vllm_sparse_backend.serving.worker.counters import DENSE, SPARSE, HostCopy
from vllm_sparse_kernels import Rows, SparseIndex
from vllm_sparse_kernels.index import causal_pairs

logger = logging.getLogger(LOGGER)

MOST_KEPT = 1024
"""Maximum number of tallies of a worker. The oldest are dropped first."""


@dataclass
class Tally:
    """Prompt tokens of a request, and the pairs of its sparse tokens in the layers and heads of this worker."""

    level: str
    ticket: str = ""
    dense_tokens: int = 0
    sparse_tokens: int = 0
    causal_pairs: int = 0
    masked_pairs: int = 0
    listed_pairs: torch.Tensor | None = None
    copied_pairs: HostCopy | None = None

    def add_tokens(self, row: BatchRow) -> None:
        """Add the tokens of a row that prefills."""
        dense = row.dense_end - row.token
        if row.kind.path in (DENSE, SPARSE):
            self.dense_tokens += dense
            self.sparse_tokens += row.query_len - dense

    def add_pairs(self, index: SparseIndex, row: int, listed_pairs: torch.Tensor) -> None:
        """Add the pairs of one row of an index. Does not wait for the device."""
        rows = index.rows
        table = rows.block_table[row : row + 1]
        single_row = Rows((0,), rows.query_lens[row : row + 1], rows.context_lens[row : row + 1], table)
        listed = listed_pairs[:, rows.tile_starts[row] : rows.tile_starts[row + 1]].sum()
        self.listed_pairs = listed if self.listed_pairs is None else self.listed_pairs + listed
        self.masked_pairs += index.num_heads * single_row.masked_pairs(index.block_tokens)
        self.causal_pairs += index.num_heads * causal_pairs(single_row)

    def add_counted_pairs(self, kept: torch.Tensor, causal: int) -> None:
        """Add pairs that a kernel has counted. Does not wait for the device."""
        self.listed_pairs = kept if self.listed_pairs is None else self.listed_pairs + kept
        self.causal_pairs += causal

    def begin_copy(self) -> None:
        """Begin to copy the pairs to the host. Does not wait for the device."""
        if self.listed_pairs is not None:
            self.copied_pairs = HostCopy(self.listed_pairs)

    @property
    def is_on_host(self) -> bool:
        """Whether ``kept_pairs`` can be read without waiting for the device."""
        return self.listed_pairs is None or (self.copied_pairs is not None and self.copied_pairs.arrived())

    @property
    def kept_pairs(self) -> int:
        """Number of kept pairs. Waits for the device unless ``is_on_host``."""
        if self.listed_pairs is None:
            return 0
        copy = self.copied_pairs
        listed = copy.host if copy is not None and copy.arrived() else self.listed_pairs
        return int(listed) - self.masked_pairs


Spans = Sequence[tuple[int, int, Tally]]
"""(first token, end, tally) of the sparse tokens in a step, for each request that has a tally."""


def ticket_in(extra_args: Mapping[str, object]) -> str | None:
    """Return the ticket of a request."""
    value = extra_args.get(REPORT)
    if isinstance(value, str):
        return value
    return "" if value else None


class RequestTallies:
    """Tallies of one worker, by the engine's request id. Keeps the latest ``MOST_KEPT``."""

    def __init__(self) -> None:
        self._by_request: OrderedDict[str, Tally] = OrderedDict()
        self._ended: deque[tuple[str, Tally]] = deque()

    def __len__(self) -> int:
        """Return the number of tallies."""
        return len(self._by_request)

    def begin(self, req_id: str, level: str, ticket: str = "") -> Tally:
        """Begin the tally of a request."""
        tally = self._by_request[req_id] = Tally(level, ticket)
        if len(self._by_request) > MOST_KEPT:
            self._by_request.popitem(last=False)
        return tally

    def end(self, req_id: str) -> None:
        """Mark a request as ended, so that ``log_ended`` logs its tally. Does not wait for the device.

        The tally stays, because the server may ask for it later.
        """
        tally = self._by_request.get(req_id)
        if tally is not None and tally.dense_tokens + tally.sparse_tokens:
            tally.begin_copy()
            self._ended.append((req_id, tally))

    def log_ended(self) -> None:
        """Log the tallies of ended requests whose pairs have arrived on the host. Does not wait for the device."""
        while self._ended and self._ended[0][1].is_on_host:
            req_id, tally = self._ended.popleft()
            kept = f", {tally.kept_pairs / tally.causal_pairs:.3f} of their pairs kept" if tally.causal_pairs else ""
            logger.info(
                "sparse-prefill: request %s, level %s: %d tokens prefilled dense, %d sparse%s",
                req_id, tally.level, tally.dense_tokens, tally.sparse_tokens, kept,
            )  # fmt: skip

    def spans_of(self, rows: Sequence[BatchRow], req_ids: Sequence[str | None], count_tokens: bool) -> Spans:
        """Return the tokens of a step that belong to a tally, and add them to their tallies."""
        spans = []
        for row, req_id in zip(rows, req_ids):
            tally = self._by_request.get(req_id or "")
            if tally is None:
                continue
            if count_tokens:
                tally.add_tokens(row)
            if row.is_sparse:
                spans.append((row.dense_end, row.end, tally))
        return spans

    def with_ticket(self, ticket: str) -> list[dict[str, Any]]:
        """Return the tallies of an HTTP request, for the server. Waits for the device if the request has just ended.

        The request's id is not used: clients choose ids, and may choose other clients' ids.
        """
        self.log_ended()
        tallies = [tally for tally in self._by_request.values() if ticket and tally.ticket == ticket]
        return [
            {
                "level": tally.level, "dense_tokens": tally.dense_tokens, "sparse_tokens": tally.sparse_tokens,
                "kept_pairs": tally.kept_pairs, "causal_pairs": tally.causal_pairs,
            } for tally in tallies
        ]  # fmt: skip


def add_pairs(spans: Spans, index: SparseIndex) -> None:
    """Add the pairs of an index to the tallies of its rows. Does not wait for the device."""
    listed_pairs = index.listed_pairs()
    for row, token in enumerate(index.rows.query_starts):
        for first, stop, tally in spans:
            if first <= token < stop:
                tally.add_pairs(index, row, listed_pairs)
