# SPDX-License-Identifier: Apache-2.0
"""A step's rows that prefill with multi-head latent attention (MLA): which rows of each call run sparse.

vLLM calls a prefill backend once for the new tokens of all rows, and once for each chunk of their contexts. All sizes
here are known to the host, so nothing waits for the device. A row runs either dense or sparse in all calls of a step.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from vllm_sparse_backend.config.request_levels import RequestLevel
from vllm_sparse_backend.serving.worker.rows import BatchRow, dense_runs
from vllm_sparse_kernels.mla import MlaCall, MlaRow
from vllm_sparse_kernels.rows import to_device

Prepare = Callable[[RequestLevel, Sequence[MlaRow], bool], MlaCall]
"""Prepares the rows of requests of the same level, given whether their keys are the new tokens."""


class MlaDenseRun(NamedTuple):
    """Consecutive queries of a call that run on vLLM's own prefill backend."""

    queries: slice
    keys: slice
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Computes the output and its log-sum-exp, given ``q``, ``k`` and ``v``."""


class SparseRows(NamedTuple):
    """Rows of a call that run sparse, with requests of the same level."""

    level: str
    call: MlaCall


@dataclass(frozen=True)
class StepCall:
    """The parts of one call of the prefill backend."""

    dense: Sequence[MlaDenseRun]
    sparse: Sequence[SparseRows]
    has_gaps: bool
    """Whether some row has no key in the call."""


@dataclass(frozen=True)
class MlaStep:
    """The calls of a step with at least one sparse row."""

    new_tokens: StepCall
    chunks: Sequence[StepCall]

    @staticmethod
    def of(rows: Sequence[BatchRow], prefill_metadata: Any, stock: Any, prepare: Prepare) -> "MlaStep | None":
        """Divide the calls of a step among its rows, of which the last ones prefill."""
        num_rows = prefill_metadata.query_start_loc.shape[0] - 1
        rows = rows[len(rows) - num_rows :]
        if not any(row.is_sparse for row in rows):
            return None
        divider = _Divider(rows, prefill_metadata, stock, prepare)
        contexts, chunks = [0] * num_rows, []
        context = prefill_metadata.chunked_context
        vllm_chunks = () if context is None else context.chunks
        for chunk in vllm_chunks:
            chunk_rows, num_keys = chunk.request_slice, chunk.seq_lens.tolist()  # on the host
            chunks.append(divider.call(chunk, rows[chunk_rows], num_keys, contexts[chunk_rows]))
            contexts[chunk_rows] = [c + n for c, n in zip(contexts[chunk_rows], num_keys, strict=True)]
        lengths, positions = [row.query_len for row in rows], [row.context_len for row in rows]
        return MlaStep(divider.call(None, rows, lengths, positions), chunks)


@dataclass(frozen=True)
class _Divider:
    """Divides calls among the rows of a step that prefill."""

    rows: Sequence[BatchRow]
    metadata: Any
    """vLLM's metadata of these rows."""
    stock: Any
    prepare: Prepare

    def call(self, chunk: Any, rows: Sequence[BatchRow], num_keys: Sequence[int], positions: Sequence[int]) -> StepCall:
        """Divide a call in which ``rows`` have ``num_keys`` keys from ``positions`` on.

        ``chunk`` is vLLM's metadata of a chunk of context, or None for the call for new tokens, which are their keys.
        """
        key_starts, first_token = list(accumulate(num_keys, initial=0)), rows[0].token
        dense = []
        for run, tokens in dense_runs(rows):
            if any(num_keys[run]):
                queries = slice(tokens.start - first_token, tokens.stop - first_token)
                keys = slice(key_starts[run.start], key_starts[run.stop])
                dense.append(MlaDenseRun(queries, keys, self._stock_attend(chunk, rows[run], num_keys[run])))
        groups: dict[RequestLevel, list[MlaRow]] = defaultdict(list)
        for i, row in enumerate(rows):
            if row.is_sparse and num_keys[i]:
                part = MlaRow(
                    query_start=row.token - first_token,
                    num_queries=row.query_len,
                    query_position=row.context_len,
                    state_start=row.token - self.rows[0].token,
                    key_start=key_starts[i],
                    num_keys=num_keys[i],
                    key_position=positions[i],
                )
                groups[row.level].append(part)
        sparse = [SparseRows(level.name, self.prepare(level, group, chunk is None)) for level, group in groups.items()]
        return StepCall(dense, sparse, has_gaps=not all(num_keys))

    def _stock_attend(
        self, chunk: Any, rows: Sequence[BatchRow], num_keys: Sequence[int]
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Return how vLLM's own backend runs consecutive rows of a call."""
        lengths = [row.query_len for row in rows]
        queries = {"query_start_loc": self._offsets(lengths), "max_query_len": max(lengths)}
        if chunk is not None:
            part = replace(chunk, **queries, cu_seq_lens=self._offsets(num_keys), max_seq_len=max(num_keys))
            return partial(self.stock.run_prefill_context_chunk, chunk=part)
        stock = copy.copy(self.stock)
        stock.prepare_metadata(replace(self.metadata, **queries, chunked_context=None))
        return partial(stock.run_prefill_new_tokens, return_softmax_lse=True)

    def _offsets(self, lengths: Sequence[int]) -> torch.Tensor:
        """Return the offsets of parts with these lengths, on the device."""
        return to_device(list(accumulate(lengths, initial=0)), torch.int32, self.metadata.query_start_loc.device)
