# SPDX-License-Identifier: Apache-2.0
"""From vLLM's batch to what each row runs on: decode rows and dense rows → the delegate, sparse rows → our kernels.

Rows are told apart by lengths that the host knows; nothing here waits for the device. A batch without a sparse row gets
the delegate's own metadata, untouched.

The first ``min_tokens`` positions of every row are dense, so that what a cache holds of them depends on no method and
no chunk size: a row that crosses that border is cut there, its first tokens are delegated, the others go sparse.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain, count, pairwise
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat, hooks
from vllm_sparse_backend.serving.arena import Memory, Row
from vllm_sparse_backend.serving.guard import Guard, pick_queries, row_of
from vllm_sparse_backend.serving.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.layers import ModelLayer, model_layers, refuse_if_none_can
from vllm_sparse_backend.serving.refusals import slow_path
from vllm_sparse_backend.serving.row_levels import levels_of_rows
from vllm_sparse_backend.serving.stats import DECODE, DENSE, PADDING, SPARSE, Recorder, is_counting
from vllm_sparse_backend.serving.step import (
    Delegated,
    Probe,
    Slab,
    SparsePrefillMetadata,
    SparseStep,
    own_block_table,
)
from vllm_sparse_backend.settings.config import load_config
from vllm_sparse_backend.settings.crossover import Thresholds, load_crossover
from vllm_sparse_backend.settings.plan import DEFAULT, Plan, layer_by_level
from vllm_sparse_backend.settings.profile import EXACT
from vllm_sparse_backend.settings.ranges import format_ranges
from vllm_sparse_backend.settings.reasons import Fallback
from vllm_sparse_backend.settings.requests import FIELD, Choices
from vllm_sparse_kernels.layer import Layer, LayerPlan

logger = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class RowKind:
    """What one row of a batch runs on, and why where it prefills dense."""

    path: str
    reason: Fallback | None = None
    level: str = DEFAULT
    """Of a sparse row: what its request asked for."""


DECODE_ROW = RowKind(DECODE)
PADDING_ROW = RowKind(PADDING)
"""A row without tokens, which fills up a batch to a graph's size."""

_numbers = count()
"""Of builders, in the order in which they are made: that of a step's later microbatch comes later."""


class SparsePrefillMetadataBuilder(compat.DelegateBuilder):
    # Metadata of another cache group would carry this group's sparse rows along.
    supports_update_block_table = False
    _warned: ClassVar[set[str]] = set()

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        return compat.uniform_decode_graphs(super().get_cudagraph_support(*args, **kwargs))

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.guard: Guard | None = None
        self.sparse_steps = 0
        self.sparse_layers: tuple[int, ...] = ()
        self.memory: Memory | None = None
        self.thresholds = {DEFAULT: Thresholds(None, 0)}
        self._counts_rows = False
        self._number = next(_numbers)
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
        plans = Plan.by_level(config, compat.model_shape(self.vllm_config), rank, size)
        groups = {number: layer_by_level(plans.values(), number) for number, _ in layers.values()}
        reasons = {
            number: impl.reason(groups[number][0] if groups[number] else None) for number, impl in layers.values()
        }
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
        self.recorder = known or Recorder(self.device, is_first_rank=rank == 0)
        self.recorder.add_layers(self.sparse_layers)
        # Every group sees all rows: that of the worker's first layer that can go sparse counts them.
        first = min(number for number, reason in reasons.items() if reason is None)
        self._counts_rows = first in self.sparse_layers
        self.memory = own[0].impl.reserve(self.vllm_config, self.device)
        if config.guard is not None:
            self.guard = next((impl.guard for _, impl in layers.values() if impl.guard is not None), None)
            self.guard = self.guard or Guard(config.guard, self.recorder, rank)
            for _, impl in own:
                impl.guard = self.guard
        impls = []
        served: dict[LayerPlan, Layer] = {}
        for number, impl in own:
            if reasons[number] is None:
                of_levels = [impl, *(impl.add_level(level) for level in plans if level != DEFAULT)]
                for one, plan, of_level in zip(of_levels, plans.values(), groups[number], strict=True):
                    if of_level not in served:
                        served[of_level] = Layer.of(of_level, one.head_size, self.device, config.engine)
                    one.adopt(number, served[of_level], self.recorder, self.memory, config.check_index)
                    one.stays_dense = plan.layer(number) is None
                impls += of_levels
        if self.memory is not None:
            self._make_ready(impls, config.engine)
        table, device_name = load_crossover(config.crossover), compat.device_name()
        for level, plan in plans.items():
            engines = {impl.at(level).layer.engine.name for number, impl in own if reasons[number] is None}
            self.thresholds[level] = plan.thresholds(table, device_name, engines)
        hooks.install_in_worker(self.vllm_config)
        if known is None and rank == 0:
            self._announce(plans)

    def _announce(self, plans: Mapping[str, Plan]) -> None:
        for level, plan in plans.items():
            for line in plan.describe(self.thresholds[level]):
                logger.info("sparse-prefill: %s", line)
        choices = Choices(plans[DEFAULT].level_names, plans[DEFAULT].level)
        logger.info("sparse-prefill: requests may have in their vllm_xargs %s: %s", FIELD, choices)
        max_len, min_tokens = self.vllm_config.model_config.max_model_len, self.thresholds[DEFAULT].min_tokens
        if min_tokens is not None and max_len <= min_tokens:
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
        warm_up(impls, self.kv_cache_spec, self.device, engine, compat.page_order(self.vllm_config))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> compat.DelegateMetadata:
        common = common_attn_metadata
        if not self.sparse_layers:
            return super().build(common_prefix_len, common, fast_build)
        if self.guard is not None:
            self.guard.judge_arrived()
        if common.max_query_len <= 1:  # every output token comes through here: no row is looked at
            if self._counts_rows:
                num_rows = int(common.query_start_loc_cpu[common.num_reqs])
                self.recorder.count_decodes(self._number, num_rows, common.block_table_tensor)
            return super().build(common_prefix_len, common, fast_build)
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        kinds = self._classify(common_prefix_len, common, starts)
        self._count(kinds, common)
        if not any(kind.path == SPARSE for kind in kinds):
            return super().build(common_prefix_len, common, fast_build)
        dense_lens = self._dense_lens(common, starts, kinds)
        delegated = tuple(self._delegate(common, starts, dense_lens, fast_build))
        slabs = self._slabs(common, starts, dense_lens, kinds)
        dense_layers, probe = self._guard(common, starts, slabs)
        # Last, as the delegate keeps one persistent buffer for its schedule: the whole batch's must be what stays.
        whole = super().build(common_prefix_len, common, fast_build)
        parts = {f.name: getattr(whole, f.name) for f in fields(whole)}
        return SparsePrefillMetadata(**parts, sparse=SparseStep(slabs, delegated, dense_layers, probe))

    def _classify(self, common_prefix_len: int, common: CommonAttentionMetadata, starts: list[int]) -> list[RowKind]:
        """What each row runs on. Rows as short as a decode's are left to the delegate: its graphs may run them."""
        threshold = self.reorder_batch_threshold or 1
        query_lens = [end - start for start, end in pairwise(starts)]
        if common.max_query_len <= threshold:
            return [DECODE_ROW if query_len else PADDING_ROW for query_len in query_lens]
        seq_lens = compat.host_seq_lens(common)
        prefilling = None if common.is_prefilling is None else common.is_prefilling.tolist()
        prefix_lm = common.mm_req_doc_ranges or {}
        levels = levels_of_rows(len(query_lens)) or [DEFAULT] * len(query_lens)
        batch_reason = None
        if common.causal is not True:
            batch_reason = Fallback.NON_CAUSAL
        elif common_prefix_len > 0:
            batch_reason = Fallback.CASCADE
        kinds = []
        for i, query_len in enumerate(query_lens):
            if query_len == 0:
                kinds.append(PADDING_ROW)
            elif query_len <= threshold or (prefilling is not None and not prefilling[i]):
                kinds.append(DECODE_ROW)
            elif levels[i] == EXACT:
                kinds.append(RowKind(DENSE, Fallback.REQUESTED))
            elif batch_reason is not None:
                kinds.append(RowKind(DENSE, batch_reason))
            elif prefix_lm.get(i):
                kinds.append(RowKind(DENSE, Fallback.PREFIX_LM))
            else:
                kinds.append(self._by_length(query_len, seq_lens[i], levels[i]))
        return kinds

    def _by_length(self, query_len: int, seq_len: int, level: str) -> RowKind:
        thresholds = self.thresholds[level]
        min_tokens = thresholds.min_tokens
        if min_tokens is None:
            return RowKind(DENSE, Fallback.NEVER_FASTER)
        if self.memory is None or seq_len <= min_tokens:
            return RowKind(DENSE, Fallback.TOO_SHORT)
        sparse_len = min(query_len, seq_len - min_tokens)
        if sparse_len < thresholds.min_query_tokens:
            return RowKind(DENSE, Fallback.SHORT_QUERY)
        if not self.memory.room.fits(Row(0, 0, sparse_len, seq_len - sparse_len)):
            return RowKind(DENSE, Fallback.NO_ROOM)
        return RowKind(SPARSE, level=level)

    def _dense_lens(self, common: CommonAttentionMetadata, starts: list[int], kinds: list[RowKind]) -> list[int]:
        """How many of each row's tokens, from its first on, the delegate takes: of a sparse row those in min_tokens."""
        first = {level: thresholds.min_tokens or 0 for level, thresholds in self.thresholds.items()}
        lens = zip(kinds, compat.host_seq_lens(common), pairwise(starts), strict=True)
        return [
            max(first[kind.level] - (seq_len - (end - start)), 0) if kind.path == SPARSE else end - start
            for kind, seq_len, (start, end) in lens
        ]

    def _count(self, kinds: list[RowKind], common: CommonAttentionMetadata) -> None:
        if not (self._counts_rows and is_counting()):
            return
        rows = [(kind.path, kind.reason) for kind in kinds]
        self.recorder.count_batch(self._number, rows, common.block_table_tensor)
        for reason in {kind.reason for kind in kinds if kind.reason is not None} - self._logged:
            self._logged.add(reason)
            logger.info("sparse-prefill: a row prefills dense: %s (said once)", reason.explain)

    def _delegate(
        self, common: CommonAttentionMetadata, starts: list[int], dense_lens: list[int], fast_build: bool
    ) -> Iterator[Delegated]:
        """The runs of neighbouring tokens that are not sparse, each with metadata of its own."""
        for rows, tokens in dense_runs(starts, dense_lens):
            yield self._run_of(common, rows, tokens, fast_build)

    def _run_of(
        self, common: CommonAttentionMetadata, rows: slice, tokens: slice, fast_build: bool = False
    ) -> Delegated:
        metadata = super().build(0, self._part_of(common, rows, tokens), fast_build)
        compat.keep_schedule(metadata)
        return Delegated(rows, tokens, metadata)

    def _guard(
        self, common: CommonAttentionMetadata, starts: list[int], slabs: tuple[Slab, ...]
    ) -> tuple[frozenset[int], Probe | None]:
        """Layers that the guard keeps dense in this step, and what it wants to be checked."""
        if self.guard is None:
            return frozenset(), None
        dense_layers = self.guard.dense_layers.intersection(self.sparse_layers)
        number, self.sparse_steps = self.sparse_steps, self.sparse_steps + 1
        layers = self.guard.due(self.sparse_layers, number)
        watched = [slab for slab in slabs if slab.level == DEFAULT]  # other levels keep to other bounds
        if not layers or not watched:
            return dense_layers, None
        tokens = pick_queries(number, watched)
        return dense_layers, Probe(self._run_of(common, row_of(starts, tokens.start), tokens), layers)

    def _part_of(self, common: CommonAttentionMetadata, rows: slice, tokens: slice) -> CommonAttentionMetadata:
        """Some rows of a batch as a batch of their own; the first and the last of them may be cut.

        Of the first only the last tokens are left then, over all keys, of the last only the first tokens.
        Made anew from what a delegate reads: a copy would bring along caches and fields that number the whole batch's
        rows or tokens.
        """
        ends, num_tokens = slice(rows.start, rows.stop + 1), tokens.stop - tokens.start
        start_loc, start_loc_cpu = (
            x[ends] - tokens.start for x in (common.query_start_loc, common.query_start_loc_cpu)
        )
        if int(start_loc_cpu[0]) < 0:
            for loc in (start_loc, start_loc_cpu):
                loc[:1].fill_(0)
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

    def _slabs(
        self, common: CommonAttentionMetadata, starts: list[int], dense_lens: list[int], kinds: list[RowKind]
    ) -> tuple[Slab, ...]:
        """What the delegate leaves of the rows, level by level, dealt out as they fit into the arena."""
        assert self.memory is not None
        ids: dict[str, list[int]] = defaultdict(list)
        rows: dict[str, list[Row]] = defaultdict(list)
        for i, (start, seq_len, kind) in enumerate(zip(starts, compat.host_seq_lens(common), kinds)):
            token, end = start + dense_lens[i], starts[i + 1]
            if token < end:
                row = Row(len(ids[kind.level]), token, end - token, seq_len - (end - token))
                rows[kind.level].append(row)
                ids[kind.level].append(i)
        table = common.block_table_tensor
        slabs = (
            self.memory.room.slabs(rows[level], own_block_table(table, ids[level]), level)
            for level in self.thresholds
            if level in rows
        )
        return tuple(chain.from_iterable(slabs))


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
