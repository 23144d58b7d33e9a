# SPDX-License-Identifier: Apache-2.0
"""Builds the metadata of each step: the tokens for the dense backend, and the rows for our kernels.

Nothing here waits for the device. A batch without a sparse row gets the dense backend's own metadata, unchanged.

The first ``min_tokens`` positions of every row are dense, so their cached keys and values do not depend on the method
or the chunk size. A row that crosses that boundary is cut there: its first tokens run dense, the others run sparse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.arena import SparseRow
from vllm_sparse_backend.serving.worker.layers import adopt_layers, require_sparse_layer
from vllm_sparse_backend.serving.worker.owner import worker_of
from vllm_sparse_backend.serving.worker.rows import (
    BatchRow,
    DenseRun,
    RowClassifier,
    Slab,
    SparseStep,
    copy_block_table_rows,
    dense_runs,
)


@dataclass
class SparsePrefillMetadata(compat.DenseMetadata):
    """The dense backend's metadata of the whole batch, for layers that run dense, and the sparse part of the step."""

    sparse: SparseStep | None = None


class SparsePrefillMetadataBuilder(compat.DenseBuilder):
    """vLLM's metadata builder of one group of layers, which adds the sparse part of each step."""

    # Metadata that is reused for another cache group would contain this group's sparse rows.
    supports_update_block_table = False

    sparse_layers: tuple[int, ...] = ()
    """Numbers of the layers of this group that run sparse. If empty, all metadata is the dense backend's own."""

    # Set only if there are such layers.
    row_classifier: RowClassifier
    counts_rows: bool
    """Whether this group counts the rows of steps. All groups of a worker see the same rows."""
    streaming_context_tokens: int | None
    """Context length in tokens from which rows are long; None without streaming heads."""

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        """Return the dense backend's support for CUDA graphs, limited to uniform batches of decodes."""
        return compat.uniform_decode_graphs(super().get_cudagraph_support(*args, **kwargs))

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        compat.limit_split_keys(self, vllm_config)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.worker = worker_of(vllm_config)
        require_sparse_layer(self.worker.vllm_config)
        # Builders that vLLM derives from this class split or lengthen requests. Their metadata stays dense.
        if type(self) is SparsePrefillMetadataBuilder:
            self._adopt_layers()

    def _adopt_layers(self) -> None:
        """Make the layers of this group run sparse if they can."""
        worker = self.worker
        adopted = adopt_layers(worker, self.layer_names, self.kv_cache_spec, getattr(self, "isa", ""))
        if adopted is None:
            return
        self.sparse_layers, self.counts_rows = adopted.numbers, adopted.is_first_group
        self.row_classifier = RowClassifier(
            adopted.lengths,
            worker.memory is not None,
            worker.requests,
            worker.recorder,
            worker.resolved.reads_prompt_length,
        )
        streaming = worker.resolved.streaming_heads
        has_heads = worker.streaming.count  # else long rows would need a launch
        self.streaming_context_tokens = streaming.min_context_tokens if streaming and has_heads else None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> compat.DenseMetadata:
        common = common_attn_metadata
        if not self.sparse_layers:
            return super().build(common_prefix_len, common, fast_build)
        max_decode_tokens = self.reorder_batch_threshold or 1
        rows = self.row_classifier.rows_of_step(common, common_prefix_len, max_decode_tokens, self.counts_rows)
        if not any(row.is_sparse for row in rows):
            return super().build(common_prefix_len, common, fast_build)
        runs = tuple(self._dense_run(common, *run, fast_build) for run in dense_runs(rows))
        slabs = self._slabs(common, rows)
        # Built last: the dense backend keeps its schedule in a persistent buffer, and the entire batch's must remain.
        whole = super().build(common_prefix_len, common, fast_build)
        parts = {field.name: getattr(whole, field.name) for field in fields(whole)}
        return SparsePrefillMetadata(**parts, sparse=SparseStep(slabs, runs, self.worker.requests.is_counted))

    def _slabs(self, common: CommonAttentionMetadata, rows: Sequence[BatchRow]) -> tuple[Slab, ...]:
        """Return the sparse parts of the rows by level and length, divided into slabs that fit into the arena."""
        assert self.worker.memory is not None
        room = self.worker.memory.room
        slabs: list[Slab] = []
        kinds = {i: (row.request, self._is_long(row)) for i, row in enumerate(rows) if row.is_sparse}
        for kind in sorted(set(kinds.values()), key=lambda kind: (kind[0].name, kind[0].kept_mass or 0, kind[1])):
            ids = [i for i, row_kind in kinds.items() if row_kind == kind]
            parts = [SparseRow.sparse_of(rows[i], number) for number, i in enumerate(ids)]
            slabs += room.slabs(parts, copy_block_table_rows(common.block_table_tensor, ids), *kind)
        return tuple(slabs)

    def _is_long(self, row: BatchRow) -> bool:
        """Return whether streaming heads keep only the first and the nearest keys in a row."""
        # A request that sets p gets that share in every head.
        if self.streaming_context_tokens is None or row.request.kept_mass is not None:
            return False
        return row.context_len >= self.streaming_context_tokens

    def _dense_run(self, common: CommonAttentionMetadata, rows: slice, tokens: slice, fast_build: bool) -> DenseRun:
        """Return a part of a batch, with the dense backend's metadata for this part."""
        metadata = super().build(0, self._part_of_batch(common, rows, tokens), fast_build)
        compat.keep_schedule(metadata)
        return DenseRun(tokens, metadata)

    def _part_of_batch(self, common: CommonAttentionMetadata, rows: slice, tokens: slice) -> CommonAttentionMetadata:
        """Return a part of a batch. A cut first row keeps its last tokens, with all keys; a cut last row its first."""
        # vLLM's function for microbatches drops fields that number the rows or tokens of the whole batch.
        (part,) = split_attn_metadata([UBatchSlice(rows, tokens)], common)
        # The device may distribute drafts among decodes: a decode can then be longer than the host knows.
        part.max_query_len = max(part.max_query_len, self.reorder_batch_threshold or 1)
        part.max_seq_len = max(compat.host_seq_lens(part))
        part.is_prefilling = None if common.is_prefilling is None else common.is_prefilling[rows]
        return part
