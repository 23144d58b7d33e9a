# SPDX-License-Identifier: Apache-2.0
"""Builds the metadata of each step: the tokens for the dense backend, and the rows for our kernels.

Nothing here waits for the device. A batch without a sparse row gets the dense backend's own metadata, unchanged.

The first ``min_tokens`` positions of every row are dense, so their cached keys and values do not depend on the method
or the chunk size. A row that crosses that boundary is cut there: its first tokens run dense, the others run sparse.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

from vllm_sparse_backend.config.request_levels import RequestLevel
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.arena import SparseRow
from vllm_sparse_backend.serving.worker.layers import SparseGroup, adopt_layers, require_sparse_layer
from vllm_sparse_backend.serving.worker.owner import worker_of
from vllm_sparse_backend.serving.worker.rows import (
    BatchRow,
    DenseRun,
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

    sparse_group: SparseGroup | None = None
    """The layers of this group that run sparse. None if there are none: all metadata is the dense backend's own."""

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
            self.sparse_group = adopt_layers(
                self.worker, self.layer_names, self.kv_cache_spec, getattr(self, "isa", "")
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> compat.DenseMetadata:
        common, group = common_attn_metadata, self.sparse_group
        rows: Sequence[BatchRow] = ()
        if group is not None:
            rows = group.row_classifier.rows_of_step(common, common_prefix_len, self.reorder_batch_threshold or 1)
            if group.counts_rows:
                self.worker.count_rows(common, rows)
        if not any(row.is_sparse for row in rows):
            return super().build(common_prefix_len, common, fast_build)
        runs = tuple(self._dense_run(common, *run, fast_build) for run in dense_runs(rows))
        slabs = self._slabs(common, rows)
        # Built last: the dense backend keeps its schedule in a persistent buffer, and the entire batch's must remain.
        whole = super().build(common_prefix_len, common, fast_build)
        parts = {field.name: getattr(whole, field.name) for field in fields(whole)}
        return SparsePrefillMetadata(**parts, sparse=SparseStep(slabs, runs, self.worker.requests.is_counted))

    def _slabs(self, common: CommonAttentionMetadata, rows: Sequence[BatchRow]) -> tuple[Slab, ...]:
        """Return the sparse parts of the rows by level, divided into slabs that fit into the arena."""
        assert self.worker.memory is not None
        groups: dict[RequestLevel, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            if row.is_sparse:
                groups[row.level].append(i)
        slabs: list[Slab] = []
        for level, ids in groups.items():
            parts = [SparseRow.sparse_of(rows[i], number) for number, i in enumerate(ids)]
            block_table = copy_block_table_rows(common.block_table_tensor, ids)
            slabs += self.worker.memory.room.slabs(parts, block_table, level)
        return tuple(slabs)

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
