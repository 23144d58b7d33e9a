"""From vLLM's batch to what each row runs on: decode rows and dense rows → the delegate, sparse rows → our kernels.

Rows are told apart by lengths that the host knows; nothing here waits for the device. A batch without a sparse row gets
the delegate's own metadata, untouched.

The first ``min_tokens`` positions of every row are dense, so that what a cache holds of them depends on no method and
no chunk size: a row that crosses that border is cut there, its first tokens are delegated, the others go sparse.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from vllm_sparse_backend.plugin import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.arena import Memory, Row
from vllm_sparse_backend.serving.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.layers import ModelLayer, model_layers, refuse_if_none_can
from vllm_sparse_backend.serving.refusals import slow_path
from vllm_sparse_backend.serving.stats import Recorder
from vllm_sparse_backend.serving.step import Delegated, Slab, SparsePrefillMetadata, SparseStep, own_block_table
from vllm_sparse_backend.settings.config import load_config
from vllm_sparse_backend.settings.crossover import Thresholds, load_crossover
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_backend.settings.ranges import format_ranges
from vllm_sparse_backend.settings.reasons import Fallback

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
    _warned: ClassVar[set[str]] = set()

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        return compat.uniform_decode_graphs(super().get_cudagraph_support(*args, **kwargs))

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.sparse_layers: tuple[int, ...] = ()
        self.memory: Memory | None = None
        self.thresholds = Thresholds(None, 0)
        self._counts_rows = False
        self._logged: set[Fallback] = set()
        refuse_if_none_can(vllm_config)
        # Builders that vLLM derives from this one cut requests up or lengthen them: what they build stays whole.
        if type(self) is SparsePrefillMetadataBuilder:
            layers = model_layers(vllm_config)
            if any(name in layers for name in layer_names):
                compat.outside_memory_pool(vllm_config, device, lambda: self._adopt(layers))

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
        # One for the worker, whose groups of layers and whose microbatches have builders of their own.
        known = next((impl.recorder for _, impl in layers.values() if impl.recorder is not None), None)
        self.recorder = known or Recorder(self.device, config.metrics_interval_s, is_first_rank=rank == 0)
        self.recorder.add_layers(self.sparse_layers)
        # Every group sees all rows: that of the first layer that can go sparse counts them.
        first = min(number for number, reason in reasons.items() if reason is None)
        self._counts_rows = first in self.sparse_layers and compat.is_first_stage(self.vllm_config)
        self.memory = own[0].impl.reserve(self.vllm_config, self.device)
        impls = []
        for number, impl in own:
            groups = plan.layer(number)
            if reasons[number] is None and groups is not None:
                impl.adopt(number, groups, self.recorder, self.memory, config.check_index, config.engine)
                impls.append(impl)
        if self.memory is not None:
            self._make_ready(impls, config.engine)
        engines = {impl.engine.name for impl in impls}
        self.thresholds = plan.thresholds(load_crossover(config.crossover), compat.device_name(), engines)
        if known is None and rank == 0:
            self._announce(plan)

    def _announce(self, plan: Plan) -> None:
        for line in plan.describe(self.thresholds):
            logger.info("sparse-prefill: %s", line)
        max_len = self.vllm_config.model_config.max_model_len
        if self.thresholds.min_tokens is not None and max_len <= self.thresholds.min_tokens:
            logger.warning("sparse-prefill: requests have %d tokens at most: all of them run dense", max_len)

    def _make_ready(self, impls: list[SparsePrefillImpl], engine: str) -> None:
        """What has to be checked or compiled before the first step."""
        if compat.IS_CPU:
            compat.check_cpu_layout(self.isa, self.kv_cache_spec)
            return
        from vllm_sparse_backend.serving.warmup import warm_up

        slow = slow_path(self.kv_cache_spec.block_size, compat.device_capability())
        if slow is not None and slow not in self._warned:  # once for a worker, whose groups have builders of their own
            self._warned.add(slow)
            logger.warning("sparse-prefill: %s", slow)
        warm_up(impls, self.kv_cache_spec, self.device, engine)

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
        dense_lens = self._dense_lens(common, starts, kinds)
        delegated = tuple(self._delegate(common, starts, dense_lens, fast_build))
        slabs = self._slabs(common, starts, dense_lens)
        # Last, as the delegate keeps one persistent buffer for its schedule: the whole batch's must be what stays.
        whole = super().build(common_prefix_len, common, fast_build)
        parts = {f.name: getattr(whole, f.name) for f in fields(whole)}
        return SparsePrefillMetadata(**parts, sparse=SparseStep(slabs, delegated))

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
            else:
                kinds.append(self._by_length(query_len, seq_lens[i]))
        return kinds

    def _by_length(self, query_len: int, seq_len: int) -> RowKind:
        min_tokens = self.thresholds.min_tokens
        if min_tokens is None:
            return RowKind(DENSE, Fallback.NEVER_FASTER)
        if self.memory is None or seq_len <= min_tokens:
            return RowKind(DENSE, Fallback.TOO_SHORT)
        sparse_len = min(query_len, seq_len - min_tokens)
        if sparse_len < self.thresholds.min_query_tokens:
            return RowKind(DENSE, Fallback.SHORT_QUERY)
        if not self.memory.room.fits(Row(0, 0, sparse_len, seq_len - sparse_len)):
            return RowKind(DENSE, Fallback.NO_ROOM)
        return RowKind(SPARSE)

    def _dense_lens(self, common: CommonAttentionMetadata, starts: list[int], kinds: list[RowKind]) -> list[int]:
        """How many of each row's tokens, from its first on, the delegate takes: of a sparse row those in min_tokens."""
        min_tokens = self.thresholds.min_tokens or 0
        lens = zip(kinds, compat.host_seq_lens(common), pairwise(starts), strict=True)
        return [
            max(min_tokens - (seq_len - (end - start)), 0) if kind.path == SPARSE else end - start
            for kind, seq_len, (start, end) in lens
        ]

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
        self, common: CommonAttentionMetadata, starts: list[int], dense_lens: list[int], fast_build: bool
    ) -> Iterator[Delegated]:
        """The runs of neighbouring tokens that are not sparse, each with metadata of its own."""
        for rows, tokens in dense_runs(starts, dense_lens):
            metadata = super().build(0, self._part_of(common, rows, tokens), fast_build)
            compat.keep_schedule(metadata)
            yield Delegated(rows, tokens, metadata)

    def _part_of(self, common: CommonAttentionMetadata, rows: slice, tokens: slice) -> CommonAttentionMetadata:
        """Some rows of a batch as a batch of their own; of the last of them only the first tokens, where it is cut.

        Made anew from what a delegate reads: a copy would bring along caches and fields that number the whole batch's
        rows or tokens.
        """
        ends, num_tokens = slice(rows.start, rows.stop + 1), tokens.stop - tokens.start
        start_loc, start_loc_cpu = (
            x[ends] - tokens.start for x in (common.query_start_loc, common.query_start_loc_cpu)
        )
        seq_lens, upper_bound = common.seq_lens[rows], common.seq_lens_cpu_upper_bound
        upper_bound = None if upper_bound is None else upper_bound[rows]
        host_seq_lens = compat.host_seq_lens(common)[rows]
        if cut_off := int(start_loc_cpu[-1]) - num_tokens:
            host_seq_lens[-1] -= cut_off
            seq_lens, upper_bound = (None if x is None else x.clone() for x in (seq_lens, upper_bound))
            for lens in (seq_lens, upper_bound):
                if lens is not None:
                    lens[-1:].fill_(host_seq_lens[-1])
            for loc in (start_loc, start_loc_cpu):
                loc[-1:].fill_(num_tokens)
        is_prefilling = common.is_prefilling
        return CommonAttentionMetadata(
            query_start_loc=start_loc,
            query_start_loc_cpu=start_loc_cpu,
            seq_lens=seq_lens,
            num_reqs=rows.stop - rows.start,
            num_actual_tokens=num_tokens,
            # Drafts may be shared out among decodes on the device: there one can be longer than the host knows.
            max_query_len=max(int(start_loc_cpu.diff().max()), self.reorder_batch_threshold or 1),
            max_seq_len=max(host_seq_lens),
            block_table_tensor=common.block_table_tensor[rows],
            slot_mapping=common.slot_mapping[tokens],
            causal=common.causal,
            seq_lens_cpu_upper_bound=upper_bound,
            is_prefilling=None if is_prefilling is None else is_prefilling[rows],
        )

    def _slabs(self, common: CommonAttentionMetadata, starts: list[int], dense_lens: list[int]) -> tuple[Slab, ...]:
        """What the delegate leaves of the rows, dealt out as they fit into the arena."""
        assert self.memory is not None
        ids: list[int] = []
        rows: list[Row] = []
        for i, (start, seq_len) in enumerate(zip(starts, compat.host_seq_lens(common))):
            token, end = start + dense_lens[i], starts[i + 1]
            if token < end:
                rows.append(Row(len(ids), token, end - token, seq_len - (end - token)))
                ids.append(i)
        return self.memory.room.slabs(rows, own_block_table(common.block_table_tensor, ids))


def dense_runs(starts: list[int], dense_lens: list[int]) -> Iterator[tuple[slice, slice]]:
    """(rows, tokens) of each stretch of tokens that the delegate takes: the first ``dense_lens[i]`` of each row i."""
    first = None
    for i, (start, end) in enumerate(pairwise(starts)):
        dense_end = start + dense_lens[i]
        if first is None and dense_end > start:
            first = i
        if first is not None and dense_end < end:
            yield slice(first, i + (dense_end > start)), slice(starts[first], dense_end)
            first = None
    if first is not None:
        yield slice(first, len(dense_lens)), slice(starts[first], starts[-1])
