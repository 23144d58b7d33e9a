# SPDX-License-Identifier: Apache-2.0
"""Counts the rows of each step, for /metrics and the log."""

import logging
from collections.abc import Sequence

from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.worker.batch_rows import DECODE_ROW, BatchRow
from vllm_sparse_backend.serving.worker.counters import Recorder

logger = logging.getLogger(LOGGER)


class RowCounter:
    """Counts rows for one group of layers.

    All groups of a worker see the same rows, so only one group counts them.
    """

    def __init__(self, recorder: Recorder, counts_rows: bool) -> None:
        self._recorder = recorder
        self._counts_rows = counts_rows
        self._logged: set[Fallback] = set()

    def count_decodes(self, common: CommonAttentionMetadata) -> None:
        """Count a batch that has no row with more than one new token; each token is a decode row."""
        if self._counts_rows:
            self._recorder.count_rows(DECODE_ROW, int(common.query_start_loc_cpu[common.num_reqs]))

    def count(self, rows: Sequence[BatchRow]) -> None:
        """Count the rows of a step, and log each new reason for dense rows."""
        if not self._counts_rows:
            return
        for row in rows:
            self._recorder.count_rows(row.kind)
        for reason in {row.kind.reason for row in rows if row.kind.reason is not None} - self._logged:
            self._logged.add(reason)
            logger.info("sparse-prefill: a row prefills dense: %s (logged once)", reason.explain)
