# SPDX-License-Identifier: Apache-2.0
"""Counts the rows of each step, for /metrics, the log and requests that ask for a report."""

import logging
from collections.abc import Mapping, Sequence

from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_backend.config.attention_reach import Reach
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.worker.batch_rows import DECODE_ROW, BatchRow, RowKind
from vllm_sparse_backend.serving.worker.counters import DENSE, SPARSE, Recorder
from vllm_sparse_backend.serving.worker.guard import Guard
from vllm_sparse_backend.serving.worker.request_tallies import Spans
from vllm_sparse_backend.serving.worker.step_context import RunnerRequests

logger = logging.getLogger(LOGGER)


class RowCounter:
    """Counts rows for one group of layers.

    All groups of a worker see the same rows, so only one group counts them.
    """

    def __init__(
        self,
        recorder: Recorder,
        requests: RunnerRequests,
        guard: Guard | None,
        layers_by_level: Mapping[str, frozenset[int]],
        heads_by_reach: Mapping[Reach, int],
        counts_rows: bool,
    ) -> None:
        self._recorder = recorder
        self._requests = requests
        self._guard = guard
        self._layers_by_level = layers_by_level
        self._heads_by_reach = heads_by_reach
        self._counts_rows = counts_rows
        self._logged: set[Fallback] = set()

    def count_decodes(self, common: CommonAttentionMetadata) -> None:
        """Count a batch that has no row with more than one new token; each token is a decode row."""
        if self._counts_rows:
            self._recorder.count_rows(DECODE_ROW, int(common.query_start_loc_cpu[common.num_reqs]))

    def count(self, rows: Sequence[BatchRow]) -> None:
        """Count the rows of a step and the pairs of prefill rows, and log each new reason for dense rows."""
        if not self._counts_rows:
            return
        prefilled = [(row.context_len, row.seq_len) for row in rows if row.kind.path in (DENSE, SPARSE)]
        pairs = sum(
            num_heads * reach.pairs(*span) for reach, num_heads in self._heads_by_reach.items() for span in prefilled
        )
        self._recorder.count("prefill_pairs", {}, pairs)
        kinds = [self._counted_kind(row.kind) for row in rows]
        for kind in kinds:
            self._recorder.count_rows(kind)
        for reason in {kind.reason for kind in kinds if kind.reason is not None} - self._logged:
            self._logged.add(reason)
            logger.info("sparse-prefill: a row prefills dense: %s (logged once)", reason.explain)

    def _counted_kind(self, kind: RowKind) -> RowKind:
        """Return the kind to count for a row: dense if the guard forces all its sparse layers dense."""
        if self._guard is None or kind.path != SPARSE:
            return kind
        places = {(layer, kind.level) for layer in self._layers_by_level[kind.level]}
        return RowKind(DENSE, Fallback.GUARD, kind.level) if places and places <= self._guard.held else kind

    def report_spans(self, rows: Sequence[BatchRow], common: CommonAttentionMetadata) -> Spans:
        """Add the tokens of a step to the tallies of requests that ask for a report."""
        tallies = self._requests.tallies
        if not len(tallies):
            return ()
        counts_tokens = self._counts_rows and self._recorder.is_first_rank
        return tallies.spans_of(rows, self._requests.ids_of_rows(common), counts_tokens)
