# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch, each with the lengths, level and kind that decide how it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel
from vllm_sparse_backend.serving.worker.counters import DECODE, PADDING, SPARSE


class RowKind(NamedTuple):
    """How a row of a batch runs."""

    path: str
    reason: Fallback | None = None
    level: str = ON


DECODE_ROW = RowKind(DECODE, level="")
PADDING_ROW = RowKind(PADDING)
"""A row without tokens that pads a batch to the size of a CUDA graph."""


@dataclass(frozen=True)
class BatchRow:
    """One request in a step."""

    token: int
    query_len: int
    context_len: int
    kind: RowKind
    min_tokens: int = 0
    request: RequestLevel = SERVER_LEVEL
    prompt_len: int | None = None

    @property
    def end(self) -> int:
        """Position after its last query among the queries of the step."""
        return self.token + self.query_len

    @property
    def seq_len(self) -> int:
        """Number of cached and new tokens."""
        return self.context_len + self.query_len

    @property
    def dense_end(self) -> int:
        """Position after the tokens that run dense: for a sparse row, the tokens within ``min_tokens``."""
        if self.kind.path != SPARSE:
            return self.end
        return self.token + max(self.min_tokens - self.context_len, 0)

    @property
    def is_sparse(self) -> bool:
        """Whether any token of the row runs sparse."""
        return self.dense_end < self.end


def dense_runs(rows: Sequence[BatchRow]) -> Iterator[tuple[slice, slice]]:
    """Yield the runs of consecutive tokens that run on the dense backend."""
    first = None
    for i, row in enumerate(rows):
        if first is None and row.dense_end > row.token:
            first = i
        if first is not None and row.is_sparse:
            yield slice(first, i + (row.dense_end > row.token)), slice(rows[first].token, row.dense_end)
            first = None
    if first is not None:
        yield slice(first, len(rows)), slice(rows[first].token, rows[-1].end)
