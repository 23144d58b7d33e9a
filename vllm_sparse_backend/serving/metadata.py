"""From vLLM's batch to what each row runs on: decode rows and dense rows → the delegate, sparse rows → our kernels.

Rows are told apart by lengths that the host knows; nothing here waits for the device. A batch without a sparse row gets
the delegate's own metadata, untouched.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from vllm_sparse_backend.plugin import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.layers import ModelLayer, model_layers, refuse_if_none_can
from vllm_sparse_backend.serving.stats import Recorder
from vllm_sparse_backend.serving.step import Delegated, SparsePrefillMetadata, SparseStep
from vllm_sparse_backend.settings.config import load_config
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_backend.settings.ranges import format_ranges
from vllm_sparse_backend.settings.reasons import Fallback
from vllm_sparse_kernels import Rows

logger = logging.getLogger(LOGGER)

SPARSE, DENSE, DECODE = "sparse", "dense", "decode"


@dataclass(frozen=True)
class RowKind:
    """What one row of a batch runs on, and why where it prefills dense."""

    path: str
    reason: Fallback | None = None


DECODE_ROW = RowKind(DECODE)
PADDING = RowKind("padding")
"""A row without tokens, which fills up a batch to a graph's size."""


class SparsePrefillMetadataBuilder(compat.DelegateBuilder):
    # Metadata of another cache group would carry this group's sparse rows along.
    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        return compat.uniform_decode_graphs(super().get_cudagraph_support(*args, **kwargs))

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.sparse_layers: tuple[int, ...] = ()
        self._counts_rows = False
        self._logged: set[Fallback] = set()
        refuse_if_none_can(vllm_config)
        # Builders that vLLM derives from this one cut requests up or lengthen them: what they build stays whole.
        if type(self) is SparsePrefillMetadataBuilder:
            layers = model_layers(vllm_config)
            if any(name in layers for name in layer_names):
                self._adopt(layers)

    def _adopt(self, layers: Mapping[str, ModelLayer]) -> None:
        """Hand each layer of this group its part of the plan, and say at start-up what will run how."""
        config = load_config(self.vllm_config.additional_config)
        rank, size = compat.tensor_parallel(self.vllm_config)
        plan = Plan.build(config, compat.model_shape(self.vllm_config), rank, size)
        reasons = {number: impl.reason(plan.layer(number)) for number, impl in layers.values()}
        own = [layers[name] for name in self.layer_names if name in layers]
        for reason in Fallback if rank == 0 else ():
            dense = [number for number, _ in own if reasons[number] is reason]
            if dense:
                logger.info("sparse-prefill: layers %s prefill dense: %s", format_ranges(dense), reason.explain)
        self.sparse_layers = tuple(sorted(number for number, _ in own if reasons[number] is None))
        if not self.sparse_layers:
            return
        self.min_tokens = plan.min_tokens
        # One for the worker, whose groups of layers and whose microbatches have builders of their own.
        known = next((impl.recorder for _, impl in layers.values() if impl.recorder is not None), None)
        self.recorder = known or Recorder(self.device, config.metrics_interval_s, is_first_rank=rank == 0)
        self.recorder.add_layers(self.sparse_layers)
        # Every group sees all rows: that of the first layer that can go sparse counts them.
        first = min(number for number, reason in reasons.items() if reason is None)
        self._counts_rows = first in self.sparse_layers and compat.is_first_stage(self.vllm_config)
        for line in plan.describe() if known is None and rank == 0 else ():
            logger.info("sparse-prefill: %s", line)
        impls = []
        for number, impl in own:
            groups = plan.layer(number)
            if reasons[number] is None and groups is not None:
                impl.adopt(number, groups, self.recorder, config.check_index)
                impls.append(impl)
        self._make_ready(impls, config.engine)

    def _make_ready(self, impls: list[Any], engine: str) -> None:
        """What has to be checked or compiled before the first step."""
        if compat.IS_CPU:
            compat.check_cpu_layout(self.isa, self.kv_cache_spec)
            return
        from vllm_sparse_backend.serving.warmup import warm_up

        warm_up(impls, self.kv_cache_spec, self.vllm_config.model_config.max_model_len, self.device, engine)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> compat.DelegateMetadata:
        """A graph is captured over a batch that is made up: its rows are not counted."""
        counts_rows, self._counts_rows = self._counts_rows, False
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._counts_rows = counts_rows

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> compat.DelegateMetadata:
        common = common_attn_metadata
        if not self.sparse_layers:
            return super().build(common_prefix_len, common, fast_build)
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        kinds = self._classify(common_prefix_len, common, starts)
        self._count(kinds)
        if not any(kind.path == SPARSE for kind in kinds):
            return super().build(common_prefix_len, common, fast_build)
        delegated = tuple(self._delegate(common, starts, kinds, fast_build))
        rows = self._sparse_rows(common, starts, kinds)
        # Last, as the delegate keeps one persistent buffer for its schedule: the whole batch's must be what stays.
        whole = super().build(common_prefix_len, common, fast_build)
        parts = {f.name: getattr(whole, f.name) for f in fields(whole)}
        return SparsePrefillMetadata(**parts, sparse=SparseStep(rows, delegated))

    def _classify(self, common_prefix_len: int, common: CommonAttentionMetadata, starts: list[int]) -> list[RowKind]:
        """What each row runs on. Rows as short as a decode's are left to the delegate: its graphs may run them."""
        threshold = self.reorder_batch_threshold or 1
        query_lens = [end - start for start, end in pairwise(starts)]
        if common.max_query_len <= threshold:
            return [DECODE_ROW if query_len else PADDING for query_len in query_lens]
        seq_lens = compat.host_seq_lens(common)
        prefilling = None if common.is_prefilling is None else common.is_prefilling.tolist()
        prefix_lm = common.mm_req_doc_ranges or {}
        batch_reason = None
        if common.causal is not True:
            batch_reason = Fallback.NON_CAUSAL
        elif common_prefix_len > 0:
            batch_reason = Fallback.CASCADE
        kinds = []
        for i, query_len in enumerate(query_lens):
            if query_len == 0:
                kinds.append(PADDING)
            elif query_len <= threshold or (prefilling is not None and not prefilling[i]):
                kinds.append(DECODE_ROW)
            elif batch_reason is not None:
                kinds.append(RowKind(DENSE, batch_reason))
            elif prefix_lm.get(i):
                kinds.append(RowKind(DENSE, Fallback.PREFIX_LM))
            elif seq_lens[i] < self.min_tokens:
                kinds.append(RowKind(DENSE, Fallback.TOO_SHORT))
            else:
                kinds.append(RowKind(SPARSE))
        return kinds

    def _count(self, kinds: list[RowKind]) -> None:
        for kind, rows in Counter(kinds).items() if self._counts_rows else ():
            if kind is PADDING:
                continue
            self.recorder.count_rows(kind.path, kind.reason, rows)
            if kind.reason is not None and kind.reason not in self._logged:
                self._logged.add(kind.reason)
                logger.info("sparse-prefill: a row prefills dense: %s (said once)", kind.reason.explain)
        self.recorder.flush_when_due()

    def _delegate(
        self, common: CommonAttentionMetadata, starts: list[int], kinds: list[RowKind], fast_build: bool
    ) -> Iterator[Delegated]:
        """The runs of neighbouring rows that are not sparse, each with metadata of its own."""
        for is_sparse, group in groupby(range(len(kinds)), key=lambda i: kinds[i].path == SPARSE):
            run = list(group)
            rows = slice(run[0], run[-1] + 1)
            tokens = slice(starts[rows.start], starts[rows.stop])
            if is_sparse or tokens.start == tokens.stop:
                continue
            metadata = super().build(0, self._part_of(common, rows, tokens), fast_build)
            compat.keep_schedule(metadata)
            yield Delegated(rows, tokens, metadata)

    def _part_of(self, common: CommonAttentionMetadata, rows: slice, tokens: slice) -> CommonAttentionMetadata:
        """Some rows of a batch as a batch of their own.

        Made anew from what a delegate reads: a copy would bring along caches and fields that number the whole batch's
        rows or tokens.
        """
        ends = slice(rows.start, rows.stop + 1)
        start_loc_cpu = common.query_start_loc_cpu[ends] - tokens.start
        longest = int(start_loc_cpu.diff().max())
        upper_bound, is_prefilling = common.seq_lens_cpu_upper_bound, common.is_prefilling
        return CommonAttentionMetadata(
            query_start_loc=common.query_start_loc[ends] - tokens.start,
            query_start_loc_cpu=start_loc_cpu,
            seq_lens=common.seq_lens[rows],
            num_reqs=rows.stop - rows.start,
            num_actual_tokens=tokens.stop - tokens.start,
            # Drafts may be shared out among decodes on the device: there one can be longer than the host knows.
            max_query_len=max(longest, self.reorder_batch_threshold or 1),
            max_seq_len=max(compat.host_seq_lens(common)[rows]),
            block_table_tensor=common.block_table_tensor[rows],
            slot_mapping=common.slot_mapping[tokens],
            causal=common.causal,
            seq_lens_cpu_upper_bound=None if upper_bound is None else upper_bound[rows],
            is_prefilling=None if is_prefilling is None else is_prefilling[rows],
        )

    @staticmethod
    def _sparse_rows(common: CommonAttentionMetadata, starts: list[int], kinds: list[RowKind]) -> Rows:
        ids = [i for i, kind in enumerate(kinds) if kind.path == SPARSE]
        seq_lens = compat.host_seq_lens(common)
        query_lens = tuple(starts[i + 1] - starts[i] for i in ids)
        if ids[-1] - ids[0] + 1 == len(ids):
            block_table = common.block_table_tensor[ids[0] : ids[-1] + 1]
        else:
            chosen = torch.tensor(ids, pin_memory=common.block_table_tensor.is_cuda)
            block_table = common.block_table_tensor.index_select(
                0, chosen.to(common.block_table_tensor.device, non_blocking=True)
            )
        return Rows(
            tokens=tuple(starts[i] for i in ids),
            query_lens=query_lens,
            context_lens=tuple(seq_lens[i] - q for i, q in zip(ids, query_lens, strict=True)),
            block_table=block_table,
        )
