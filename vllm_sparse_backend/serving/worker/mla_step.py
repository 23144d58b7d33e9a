# SPDX-License-Identifier: Apache-2.0
"""A step's rows that prefill with multi-head latent attention (MLA): which part of each call runs sparse.

vLLM calls a prefill backend once for the new tokens of all rows, and once for each chunk of their contexts. All sizes
here are known to the host, so nothing waits for the device.

The first ``min_tokens`` positions of a row are dense. A row that crosses that boundary is cut there: its first tokens,
its *head*, run dense. Its other tokens run sparse. Keys of the head are then a part of these tokens' context.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from vllm_sparse_backend.config.mla import MlaMethod
from vllm_sparse_backend.config.request_levels import RequestLevel
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.rows import BatchRow, dense_runs
from vllm_sparse_kernels.mla import MlaRow
from vllm_sparse_kernels.rows import to_device

MethodOf = Callable[[RequestLevel], MlaMethod]


class MlaBatch(NamedTuple):
    """The rows of a step."""

    rows: Sequence[BatchRow]
    is_counted: bool


@dataclass(frozen=True)
class DenseRun:
    """Consecutive queries of a call that run on vLLM's own prefill backend."""

    queries: slice
    keys: slice
    stock: Any
    chunk: Any = None
    """vLLM's metadata of these rows' part of a chunk of context; None for new tokens."""


@dataclass(frozen=True)
class SparseRows:
    """Rows of a call that run sparse with the same method."""

    level: str
    method: MlaMethod
    rows: tuple[MlaRow, ...]
    is_causal: bool

    @property
    def causal_pairs(self) -> int:
        """Number of (query, key) pairs of dense attention, of one head."""
        return sum(causal_pairs(row, self.is_causal) for row in self.rows)


def causal_pairs(row: MlaRow, is_causal: bool) -> int:
    """Return the number of (query, key) pairs of dense attention of a row in a call, of one head."""
    return row.num_queries * (row.num_queries + 1) // 2 if is_causal else row.num_queries * row.num_keys


@dataclass(frozen=True)
class Call:
    """The parts of one call of the prefill backend."""

    dense: tuple[DenseRun, ...] = ()
    sparse: tuple[SparseRows, ...] = ()
    heads: tuple[SparseRows, ...] = ()
    empty: tuple[slice, ...] = ()


@dataclass(frozen=True)
class MlaStep:
    """The calls of a step with at least one sparse row."""

    new_tokens: Call
    chunks: tuple[Call, ...]
    is_counted: bool

    @staticmethod
    def of(batch: MlaBatch, prefill_metadata: Any, stock: Any, method_of: MethodOf) -> "MlaStep | None":
        """Divide the calls of a step among rows."""
        num_rows = prefill_metadata.query_start_loc.shape[0] - 1
        rows = batch.rows[len(batch.rows) - num_rows :]
        if not any(row.is_sparse for row in rows):
            return None
        parts = _RowParts(rows, method_of)
        offsets = _Offsets()
        runs = [_new_tokens_runs(parts, offsets)]
        chunk_keys = []
        contexts = [0] * num_rows
        for chunk_rows, num_keys in compat.mla_chunks(prefill_metadata):
            keys = _ChunkKeys(chunk_rows, num_keys, contexts[chunk_rows])
            chunk_keys.append(keys)
            runs.append(list(_chunk_runs(parts, keys, offsets)))
            for row, count in zip(range(chunk_rows.start, chunk_rows.stop), num_keys, strict=True):
                contexts[row] += count
        table = to_device(offsets.numbers, torch.int32, prefill_metadata.query_start_loc.device)
        new_tokens = Call(
            dense=tuple(_prepared_new_tokens(run, prefill_metadata, stock, table) for run in runs[0]),
            sparse=parts.group(parts.new_row, is_causal=True),
            heads=parts.group(parts.head_row, is_causal=False),
        )
        chunks = []
        for i_chunk, (keys, chunk_runs) in enumerate(zip(chunk_keys, runs[1:], strict=True)):
            dense = [run for run in chunk_runs if run.max_keys]
            chunks.append(
                Call(
                    dense=tuple(_prepared_chunk(run, prefill_metadata, i_chunk, stock, table) for run in dense),
                    sparse=parts.group(partial(parts.chunk_row, keys), is_causal=False),
                    empty=(
                        *(run.queries for run in chunk_runs if not run.max_keys),
                        *parts.sparse_without_keys(keys),
                    ),
                )
            )
        return MlaStep(new_tokens, tuple(chunks), batch.is_counted)


class _ChunkKeys(NamedTuple):
    """The keys of a chunk of context."""

    rows: slice
    num_keys: list[int]
    positions: list[int]
    """Position of each row's first key in its request."""

    @property
    def starts(self) -> list[int]:
        """Offset of each row's keys, and their total number."""
        return list(accumulate(self.num_keys, initial=0))


@dataclass
class _Offsets:
    """Offsets of rows' queries and keys, collected for a single copy to the device."""

    numbers: list[int] = field(default_factory=list)

    def add(self, lengths: Sequence[int]) -> slice:
        """Add the offsets of parts with these lengths. Return their place in the copy."""
        start = len(self.numbers)
        self.numbers += accumulate(lengths, initial=0)
        return slice(start, len(self.numbers))


class _Run(NamedTuple):
    """A dense run before its offsets are on the device."""

    queries: slice
    keys: slice
    query_offsets: slice
    max_queries: int
    key_offsets: slice
    max_keys: int


class _RowParts:
    """The rows of a step that prefill. Their tokens are counted from the first of these rows."""

    def __init__(self, rows: Sequence[BatchRow], method_of: MethodOf) -> None:
        self.rows, self._method_of = rows, method_of
        self.first_token = rows[0].token

    def start(self, i_row: int) -> int:
        """Return the first token of a row."""
        return self.rows[i_row].token - self.first_token

    def dense_end(self, i_row: int) -> int:
        """Return the token after a row's dense tokens."""
        return self.rows[i_row].dense_end - self.first_token

    def dense_runs(self) -> Iterator[tuple[range, slice]]:
        """Yield the rows and tokens of each run of dense tokens. The last row may be cut."""
        for rows, tokens in dense_runs(self.rows):
            yield range(rows.start, rows.stop), slice(tokens.start - self.first_token, tokens.stop - self.first_token)

    def num_dense(self, i_row: int) -> int:
        """Return the number of a row's dense tokens."""
        return self.dense_end(i_row) - self.start(i_row)

    def new_row(self, i_row: int) -> MlaRow:
        """Return the sparse tokens of a row, with themselves as keys."""
        row, first = self.rows[i_row], self.dense_end(i_row)
        num_queries, position = row.end - row.dense_end, row.context_len + self.num_dense(i_row)
        return MlaRow(
            query_start=first,
            num_queries=num_queries,
            query_position=position,
            state_start=first,
            key_start=first,
            num_keys=num_queries,
            key_position=position,
        )

    def head_row(self, i_row: int) -> MlaRow | None:
        """Return the sparse tokens of a row with the keys of its head; None if it has no head."""
        num_keys = self.num_dense(i_row)
        if num_keys == 0:
            return None
        return self.new_row(i_row)._replace(
            key_start=self.start(i_row), num_keys=num_keys, key_position=self.rows[i_row].context_len
        )

    def chunk_row(self, keys: _ChunkKeys, i_row: int) -> MlaRow | None:
        """Return the sparse tokens of a row with its keys in a chunk; None if the chunk has no key of the row."""
        if not keys.rows.start <= i_row < keys.rows.stop:
            return None
        place = i_row - keys.rows.start
        if keys.num_keys[place] == 0:
            return None
        row = self.new_row(i_row)
        return row._replace(
            query_start=row.query_start - self.start(keys.rows.start),
            key_start=keys.starts[place],
            num_keys=keys.num_keys[place],
            key_position=keys.positions[place],
        )

    def sparse_without_keys(self, keys: _ChunkKeys) -> Iterator[slice]:
        """Yield the sparse queries of rows of a chunk that have no key in it."""
        first_query = self.start(keys.rows.start)
        for place, i_row in enumerate(range(keys.rows.start, keys.rows.stop)):
            row = self.rows[i_row]
            if keys.num_keys[place] == 0 and row.is_sparse:
                yield slice(self.dense_end(i_row) - first_query, row.end - self.first_token - first_query)

    def group(self, part_of: Callable[[int], MlaRow | None], is_causal: bool) -> tuple[SparseRows, ...]:
        """Return parts of the sparse rows, grouped by their requests' levels."""
        groups: dict[RequestLevel, list[MlaRow]] = defaultdict(list)
        for i_row, row in enumerate(self.rows):
            part = part_of(i_row) if row.is_sparse else None
            if part is not None:
                groups[row.request].append(part)
        return tuple(
            SparseRows(level=request.name, method=self._method_of(request), rows=tuple(parts), is_causal=is_causal)
            for request, parts in groups.items()
        )


def _new_tokens_runs(parts: _RowParts, offsets: _Offsets) -> list[_Run]:
    """Return the dense runs of new tokens, whose keys are the tokens themselves."""
    runs = []
    for rows, tokens in parts.dense_runs():
        lengths = [parts.num_dense(i_row) for i_row in rows]
        place = offsets.add(lengths)
        runs.append(_Run(tokens, tokens, place, max(lengths), place, max(lengths)))
    return runs


def _chunk_runs(parts: _RowParts, keys: _ChunkKeys, offsets: _Offsets) -> Iterator[_Run]:
    """Yield the dense runs of a chunk: the rows of the step's runs that have tokens in it."""
    first_query, starts = parts.start(keys.rows.start), keys.starts
    for run_rows, _ in parts.dense_runs():
        rows = range(max(run_rows.start, keys.rows.start), min(run_rows.stop, keys.rows.stop))
        lengths = [parts.num_dense(i_row) for i_row in rows]
        if not any(lengths):
            continue
        places = range(rows.start - keys.rows.start, rows.stop - keys.rows.start)
        num_keys = [keys.num_keys[place] for place in places]
        yield _Run(
            queries=slice(parts.start(rows[0]) - first_query, parts.dense_end(rows[-1]) - first_query),
            keys=slice(starts[places[0]], starts[places[-1] + 1]),
            query_offsets=offsets.add(lengths),
            max_queries=max(lengths),
            key_offsets=offsets.add(num_keys),
            max_keys=max(num_keys),
        )


def _prepared_new_tokens(run: _Run, prefill_metadata: Any, stock: Any, table: torch.Tensor) -> DenseRun:
    part = compat.mla_new_tokens_part(prefill_metadata, table[run.query_offsets], run.max_queries)
    return DenseRun(run.queries, run.keys, _prepared(stock, part))


def _prepared_chunk(run: _Run, prefill_metadata: Any, i_chunk: int, stock: Any, table: torch.Tensor) -> DenseRun:
    chunk = compat.mla_chunk_part(
        prefill_metadata.chunked_context.chunks[i_chunk],
        table[run.query_offsets],
        run.max_queries,
        table[run.key_offsets],
        run.max_keys,
    )
    return DenseRun(run.queries, run.keys, _prepared(stock, prefill_metadata), chunk)


def _prepared(stock: Any, prefill_metadata: Any) -> Any:
    """Return a copy of vLLM's backend that is prepared for a part of a step."""
    part = copy.copy(stock)
    part.prepare_metadata(prefill_metadata)
    return part
