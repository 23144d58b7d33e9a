# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch, each with all that decides what runs it: from the builder to the layers, one object a row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.plan import DEFAULT
from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel
from vllm_sparse_backend.serving.worker.counters import DECODE, PADDING, SPARSE


class RowKind(NamedTuple):
    """What one row of a batch runs on, and why where it prefills dense."""

    path: str
    reason: Fallback | None = None
    level: str = DEFAULT
    """The name of its request's level, for counters; of decodes nobody knows."""


DECODE_ROW = RowKind(DECODE, level="")
PADDING_ROW = RowKind(PADDING)
"""A row without tokens, which fills up a batch to a graph's size."""


@dataclass(frozen=True)
class BatchRow:
    """One request in a step: where its tokens begin in q, how many are new and cached, and what they run on."""

    token: int
    query_len: int
    context_len: int
    kind: RowKind
    min_tokens: int = 0
    """Of a sparse row: its first positions, which are dense."""
    request: RequestLevel = SERVER_LEVEL
    """The level of its request."""

    @property
    def end(self) -> int:
        return self.token + self.query_len

    @property
    def seq_len(self) -> int:
        return self.context_len + self.query_len

    @property
    def dense_end(self) -> int:
        """The dense backend takes the row's tokens before this one: of a sparse row those within ``min_tokens``."""
        if self.kind.path != SPARSE:
            return self.end
        return self.token + max(self.min_tokens - self.context_len, 0)

    @property
    def is_sparse(self) -> bool:
        """Whether any token of it is."""
        return self.dense_end < self.end


def dense_runs(rows: Sequence[BatchRow]) -> Iterator[tuple[slice, slice]]:
    """(rows, tokens) of each stretch of neighbouring tokens that the dense backend takes."""
    first = None
    for i, row in enumerate(rows):
        if first is None and row.dense_end > row.token:
            first = i
        if first is not None and row.is_sparse:
            yield slice(first, i + (row.dense_end > row.token)), slice(rows[first].token, row.dense_end)
            first = None
    if first is not None:
        yield slice(first, len(rows)), slice(rows[first].token, rows[-1].end)
