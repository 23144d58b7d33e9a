# SPDX-License-Identifier: Apache-2.0
"""A step as values: the levels of its rows, how each row runs, and the parts that layers run dense and sparse.

All of it follows from lengths and levels that the host knows, so nothing here waits for the device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_backend.config.crossover_table import Lengths
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel, level_in
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.counters import DECODE_ROW, DENSE, PADDING_ROW, SPARSE, RowKind
from vllm_sparse_kernels import Rows
from vllm_sparse_kernels.rows import round_up, to_device

TABLE_STEP = 16
"""Each row of a copied block table has a multiple of this number of entries."""


# --- the levels of a step's rows ---


@dataclass
class Step:
    """A step of a worker's runner while it runs, and the levels of the worker's requests."""

    levels: Mapping[str, RequestLevel]
    scheduled: Mapping[str, int]
    req_ids: Callable[[], Sequence[str]] = tuple
    """Returns the request of each row, once the runner has ordered the batch."""


class Requests:
    """The requests of a worker, and the step that it runs. Hooks around its runner fill it in; builders read it."""

    step: Step | None = None
    """None outside of steps and in vLLM's dummy runs."""

    def __init__(self) -> None:
        self._levels: dict[str, RequestLevel] = {}

    @contextmanager
    def run_step(self, scheduler_output: Any) -> Iterator[Step]:
        """Update the requests, and let builders read the step while it runs."""
        for req_id in scheduler_output.finished_req_ids:
            self._levels.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            level = level_in(new.sampling_params.extra_args)
            if level is not None:
                self._levels[new.req_id] = level
        self.step = Step(self._levels, scheduler_output.num_scheduled_tokens)
        try:
            yield self.step
        finally:
            self.step = None

    @property
    def is_counted(self) -> bool:
        """Whether the step has a request of a client. Dummy runs and the requests of vLLM's warm-up have none."""
        step = self.step
        return step is not None and any(req_id in step.levels for req_id in step.scheduled)

    def levels_of_rows(self, num_rows: int) -> list[RequestLevel] | None:
        """Return the level of each row of a batch; None if it cannot be known.

        Rows that pad a batch, or that vLLM made up to warm up, get the server's own level. Rows are not looked up if
        all of them would get it.
        """
        step = self.step
        if step is None or all(step.levels.get(req_id, SERVER_LEVEL) == SERVER_LEVEL for req_id in step.scheduled):
            return [SERVER_LEVEL] * num_rows
        req_ids = step.req_ids()
        if not 0 < len(req_ids) <= num_rows:
            return None
        levels = [step.levels.get(req_id, SERVER_LEVEL) for req_id in req_ids]
        return levels + [SERVER_LEVEL] * (num_rows - len(levels))


# --- how each row runs ---


@dataclass(frozen=True)
class BatchRow:
    """One request in a step."""

    token: int
    """Index of the row's first query in the step."""
    query_len: int
    context_len: int
    kind: RowKind
    dense_end: int
    """Index in the step of the first query after the row's dense ones. In a sparse row, queries at positions below
    ``min_tokens`` are dense; in other rows, all are."""
    level: RequestLevel = SERVER_LEVEL

    @property
    def end(self) -> int:
        """Index after the row's last query in the step."""
        return self.token + self.query_len

    @property
    def is_sparse(self) -> bool:
        """Whether any token of the row runs sparse."""
        return self.dense_end < self.end


@dataclass(frozen=True)
class RowClassifier:
    """Decides how the rows of batches run: decode and dense rows on the dense backend, sparse rows on our kernels."""

    lengths: Mapping[str, Lengths]
    """By level, the lengths from which rows run sparse."""
    requests: Requests
    cuts_rows: bool = True
    """Whether a row that crosses ``min_tokens`` runs sparse from there on. Otherwise all of it runs dense."""

    def rows_of_step(
        self, common: CommonAttentionMetadata, common_prefix_len: int, max_decode_tokens: int
    ) -> Sequence[BatchRow]:
        """Decide how each row of a batch runs; return none if no row prefills."""
        if common.max_query_len <= max_decode_tokens:  # the path of every output token: rows are not inspected
            return ()
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        seq_lens = compat.host_seq_lens(common)
        levels = self.requests.levels_of_rows(common.num_reqs)
        batch_reason = Fallback.UNNAMED if levels is None else _dense_reason_of_batch(common, common_prefix_len)
        levels = levels or [SERVER_LEVEL] * common.num_reqs
        prefilling = [True] * common.num_reqs if common.is_prefilling is None else common.is_prefilling.tolist()
        rows = []
        for i, (start, end) in enumerate(pairwise(starts)):
            query_len, seq_len, level = end - start, seq_lens[i], levels[i]
            if query_len == 0:
                kind = PADDING_ROW
            elif query_len <= max_decode_tokens or not prefilling[i]:
                kind = DECODE_ROW
            else:
                reason = Fallback.REQUESTED if level.name == EXACT else batch_reason
                if reason is None:
                    reason = self._dense_reason(query_len, seq_len, level.name)
                kind = RowKind(SPARSE if reason is None else DENSE, reason, level.name)
            context_len, dense_end = seq_len - query_len, end
            if kind.path == SPARSE:
                dense_end = start + max(self.lengths[level.name].min_tokens - context_len, 0)
            rows.append(BatchRow(start, query_len, context_len, kind, dense_end, level))
        return rows

    def _dense_reason(self, query_len: int, seq_len: int, level: str) -> Fallback | None:
        """Return why a row of these lengths in tokens prefills dense; None if it runs sparse."""
        lengths = self.lengths[level]
        if reason := lengths.dense_reason(query_len, seq_len):
            return reason
        begins_within = not self.cuts_rows and seq_len - query_len < lengths.min_tokens
        return Fallback.TOO_SHORT if begins_within else None


def _dense_reason_of_batch(common: CommonAttentionMetadata, common_prefix_len: int) -> Fallback | None:
    """Return why no row of the batch can run sparse; None if some may."""
    if common.causal is not True:
        return Fallback.NON_CAUSAL
    return Fallback.CASCADE if common_prefix_len > 0 else None


def count_decodes(common: CommonAttentionMetadata) -> int:
    """Return the number of rows of a batch in which no row prefills, without those that pad it."""
    if common.max_query_len <= 1:  # each row has one token
        return int(common.query_start_loc_cpu[common.num_reqs])
    return int(common.query_start_loc_cpu[: common.num_reqs + 1].diff().count_nonzero())


def dense_runs(rows: Sequence[BatchRow]) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and tokens of each run of consecutive tokens that run on the dense backend."""
    first = None
    for i, row in enumerate(rows):
        if first is None and row.dense_end > row.token:
            first = i
        if first is not None and row.is_sparse:
            yield slice(first, i + (row.dense_end > row.token)), slice(rows[first].token, row.dense_end)
            first = None
    if first is not None:
        yield slice(first, len(rows)), slice(rows[first].token, rows[-1].end)


# --- the parts of a step that layers run ---


@dataclass(frozen=True)
class DenseRun:
    """Consecutive tokens that the dense backend runs."""

    tokens: slice
    metadata: compat.DenseMetadata


class Slab(NamedTuple):
    """Sparse rows of a step that select and attend together.

    Most steps have one slab for each level. A step has more if the arena cannot hold all its rows at once.
    """

    rows: Rows
    level: RequestLevel = SERVER_LEVEL


@dataclass(frozen=True)
class SparseStep:
    """The sparse rows and the dense runs of a step."""

    slabs: tuple[Slab, ...]
    dense_runs: tuple[DenseRun, ...]
    is_counted: bool = True


def copy_block_table_rows(block_table: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Copy some rows of a block table. Does not wait for the device.

    Rows of the copy begin at multiples of 64 bytes, as in vLLM's block tables: Triton compiles kernels separately for
    addresses that are multiples of 16 bytes.
    """
    max_pages, device = block_table.shape[1], block_table.device
    padded = torch.empty(len(ids), round_up(max_pages, TABLE_STEP), dtype=torch.int32, device=device)
    copy = padded[:, :max_pages]
    if ids[-1] - ids[0] + 1 == len(ids):
        return copy.copy_(block_table[ids[0] : ids[-1] + 1])
    return copy.copy_(block_table.index_select(0, to_device(ids, torch.int64, device)))
