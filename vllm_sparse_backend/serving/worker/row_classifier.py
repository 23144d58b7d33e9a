# SPDX-License-Identifier: Apache-2.0
"""Decides how each row of a batch runs: decode and dense rows on the dense backend, sparse rows on our kernels.

The decision uses lengths that the host knows, so nothing here waits for the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_backend.config.crossover_table import Thresholds
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.batch_rows import DECODE_ROW, PADDING_ROW, BatchRow, RowKind
from vllm_sparse_backend.serving.worker.counters import DENSE, SPARSE
from vllm_sparse_backend.serving.worker.step_context import RunnerRequests


@dataclass(frozen=True)
class RowClassifier:
    """Classifies the rows of batches by their lengths and the levels of their requests."""

    thresholds: Mapping[str, Thresholds]
    has_sparse_layers: bool
    requests: RunnerRequests
    reads_prompt_length: bool = False

    def classify(
        self, common: CommonAttentionMetadata, common_prefix_len: int, max_decode_tokens: int
    ) -> list[BatchRow]:
        """Decide how each row of a batch runs."""
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        if common.max_query_len <= max_decode_tokens:  # no row prefills: sequence lengths and levels are not needed
            return [
                BatchRow(start, end - start, 0, DECODE_ROW if end > start else PADDING_ROW)
                for start, end in pairwise(starts)
            ]
        seq_lens = compat.host_seq_lens(common)
        levels, prompt_lens, are_known = self._requests_of_rows(common)
        batch_reason = _dense_reason_of_batch(common, common_prefix_len) if are_known else Fallback.UNNAMED
        prefilling = [True] * common.num_reqs if common.is_prefilling is None else common.is_prefilling.tolist()
        prefix_lm = common.mm_req_doc_ranges or {}
        rows = []
        for i, (start, end) in enumerate(pairwise(starts)):
            query_len, seq_len, level = end - start, seq_lens[i], levels[i].name
            if query_len == 0:
                kind = PADDING_ROW
            elif query_len <= max_decode_tokens or not prefilling[i]:
                kind = DECODE_ROW
            else:
                reason = Fallback.REQUESTED if level == EXACT else batch_reason
                if reason is None and prefix_lm.get(i):
                    reason = Fallback.PREFIX_LM
                if reason is None:
                    reason = self._dense_reason(query_len, seq_len, level)
                kind = RowKind(SPARSE if reason is None else DENSE, reason, level)
            min_tokens = (self.thresholds[level].min_tokens or 0) if kind.path == SPARSE else 0
            rows.append(
                BatchRow(start, query_len, seq_len - query_len, kind, min_tokens, levels[i], prompt_len=prompt_lens[i])
            )
        return rows

    def _requests_of_rows(
        self, common: CommonAttentionMetadata
    ) -> tuple[Sequence[RequestLevel], Sequence[int | None], bool]:
        """Return the level and the prompt length of each row's request, and whether all that rows need is known.

        Prompt lengths are None if no method needs them. What is not known has a default.
        """
        levels = self.requests.levels_of_rows(common)
        prompt_lens = self.requests.prompt_lens_of_rows(common) if self.reads_prompt_length else None
        are_known = levels is not None and (prompt_lens is not None or not self.reads_prompt_length)
        num_rows = common.num_reqs
        return levels or [SERVER_LEVEL] * num_rows, prompt_lens or [None] * num_rows, are_known

    def _dense_reason(self, query_len: int, seq_len: int, level: str) -> Fallback | None:
        """Return why a row of these lengths in tokens prefills dense; None if it runs sparse."""
        thresholds = self.thresholds[level]
        if reason := thresholds.dense_reason(query_len, seq_len):
            return reason
        return None if self.has_sparse_layers else Fallback.TOO_SHORT


def _dense_reason_of_batch(common: CommonAttentionMetadata, common_prefix_len: int) -> Fallback | None:
    """Return why no row of the batch can run sparse; None if some may."""
    if common.causal is not True:
        return Fallback.NON_CAUSAL
    return Fallback.CASCADE if common_prefix_len > 0 else None
