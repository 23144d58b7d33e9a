# SPDX-License-Identifier: Apache-2.0
"""From vLLM's batch to what each row runs on: decode and dense rows → the dense backend, sparse rows → our kernels.

Rows are told apart by lengths that the host knows; nothing here waits for the device. A batch without a sparse row gets
the dense backend's own metadata, untouched.

The first ``min_tokens`` positions of every row are dense, so that what a cache holds of them depends on no method and
no chunk size: a row that crosses that border is cut there, its first tokens run dense, the others go sparse.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

from vllm_sparse_backend.config.crossover_table import AUTO, Thresholds
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.plan import DEFAULT
from vllm_sparse_backend.config.profile import EXACT, SHARE
from vllm_sparse_backend.config.ranges import MOST_COUNT, format_ranges
from vllm_sparse_backend.config.request_levels import FIELD, SERVER_LEVEL
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat, hooks
from vllm_sparse_backend.serving.level_policy import choices
from vllm_sparse_backend.serving.startup import slow_path
from vllm_sparse_backend.serving.worker.arena import Memory, Row
from vllm_sparse_backend.serving.worker.batch_rows import DECODE_ROW, PADDING_ROW, BatchRow, RowKind, dense_runs
from vllm_sparse_backend.serving.worker.counters import DENSE, SPARSE, is_counting
from vllm_sparse_backend.serving.worker.guard import Guard, Place, pick_queries
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.model_layers import ModelLayer, model_layers, reaches, refuse_if_none_can
from vllm_sparse_backend.serving.worker.request_tallies import TALLIES, spans_of
from vllm_sparse_backend.serving.worker.shared_worker import Worker
from vllm_sparse_backend.serving.worker.step import (
    DenseRun,
    Probe,
    Slab,
    SparsePrefillMetadata,
    SparseStep,
    own_block_table,
)

logger = logging.getLogger(LOGGER)


class SparsePrefillMetadataBuilder(compat.DenseBuilder):
    # Metadata of another cache group would carry this group's sparse rows along.
    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        return compat.uniform_decode_graphs(super().get_cudagraph_support(*args, **kwargs))

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.guard: Guard | None = None
        self.sparse_steps: Counter[str] = Counter()
        self.sparse_layers: tuple[int, ...] = ()
        self.layers_at: dict[str, set[int]] = {}
        self.memory: Memory | None = None
        self.thresholds = {DEFAULT: Thresholds(None, 0)}
        self.judged_share = 0.0
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
        own = [layers[name] for name in self.layer_names if name in layers]
        worker = own[0].impl.join(self.vllm_config, self.device, planned=True)
        if worker.resolved.is_dense:
            if worker.rank == 0 and worker.says("pooling"):
                logger.info(
                    "sparse-prefill: this server pools: every row prefills dense, as vLLM has it; what is embedded is "
                    'compared with what is stored. "requests": {"default": "on"} in the settings lets it go sparse'
                )
            return
        groups = {number: worker.resolved.layer(number) for number, _ in layers.values()}
        reasons = {number: impl.reason(groups[number]) for number, impl in layers.values()}
        for reason in Fallback if worker.rank == 0 else ():
            dense = [number for number, _ in own if reasons[number] is reason]
            if dense:
                logger.info("sparse-prefill: layers %s prefill dense: %s", format_ranges(dense), reason.explain)
        sparse = {number: impl for number, impl in own if reasons[number] is None}
        self.sparse_layers = tuple(sorted(sparse))
        if not sparse:
            return
        self.recorder, self.memory, self.guard = worker.recorder, worker.reserve(), worker.watch_over()
        self.judged_share = worker.resolved.plan.largest_share
        self.requests = worker.requests
        self.recorder.add_layers(self.sparse_layers, worker.resolved.plans)
        can = {number for number, reason in reasons.items() if reason is None}
        for level, plan in worker.resolved.plans.items():
            self.layers_at[level] = {number for number in can if plan.layer(number) is not None}
        # Every group sees all rows: that of the worker's first layer that can go sparse counts them.
        self._counts_rows = min(can) in self.sparse_layers
        self.reaches = reaches(self.vllm_config)
        impls = [
            one for number in self.sparse_layers for one in sparse[number].adopt_levels(number, groups[number], worker)
        ]
        if self.memory is not None:
            self._make_ready(impls, worker)
        for level in worker.resolved.plans:
            names = {impl.at(level).layer.engine.name for impl in sparse.values()}
            found = worker.resolved.thresholds(level, names)
            by_operator = worker.resolved.config.min_query_tokens != AUTO
            self.thresholds[level] = found if by_operator else found.fitted(*largest_chunks(self.vllm_config))
        hooks.install_in_worker(self.vllm_config)
        if worker.rank == 0 and worker.says("plans"):
            self._announce(worker.resolved)

    def _announce(self, resolved: Resolved) -> None:
        for level, plan in resolved.plans.items():
            for line in plan.describe(self.thresholds[level]) if level != SHARE else ():
                logger.info("sparse-prefill: %s", line)
        found = choices(self.vllm_config, resolved)
        logger.info("sparse-prefill: requests may have in their vllm_xargs %s: %s", FIELD, found)
        if resolved.config.requests.model_fields_set:
            logger.info("sparse-prefill: policy for requests: %s", found.policy())
        max_len, own = self.vllm_config.model_config.max_model_len, self.thresholds[DEFAULT]
        if own.min_tokens is None:
            return
        if max_len <= own.min_tokens:
            logger.warning("sparse-prefill: requests have %d tokens at most: all of them run dense", max_len)
            return
        chunk, busy = largest_chunks(self.vllm_config)
        if busy < own.min_query_tokens:
            logger.warning(
                "sparse-prefill: a step has %d new tokens of a request at most, and %d beside as many decodes as there "
                "may be, and runs dense with fewer than %d: raise --max-num-batched-tokens (and "
                "--long-prefill-token-threshold, where it is set), or lower min_query_tokens",
                chunk, busy, own.min_query_tokens,
            )  # fmt: skip

    def _make_ready(self, impls: list[SparsePrefillImpl], worker: Worker) -> None:
        """What has to be checked or compiled before the first step."""
        if compat.IS_CPU:
            compat.check_cpu_layout(self.isa, self.kv_cache_spec)
            return
        from vllm_sparse_backend.serving.worker.warmup import warm_up

        slow = slow_path(self.kv_cache_spec.block_size, compat.device_capability())
        if slow is not None and worker.says(slow):
            logger.warning("sparse-prefill: %s", slow)
        engine, order = worker.resolved.config.engine, compat.page_order(self.vllm_config)
        warm_up(impls, self.kv_cache_spec, self.device, engine, order, compat.gather_over_ranks)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> compat.DenseMetadata:
        common = common_attn_metadata
        if not self.sparse_layers:
            return super().build(common_prefix_len, common, fast_build)
        if self.guard is not None:
            self.guard.judge_arrived()
        if common.max_query_len <= 1:  # every output token comes through here: no row is looked at
            if self._counts_rows:
                self.recorder.count_rows(DECODE_ROW, int(common.query_start_loc_cpu[common.num_reqs]))
            return super().build(common_prefix_len, common, fast_build)
        rows = self._classify(common_prefix_len, common)
        self._count(rows, common)
        spans = (
            spans_of(rows, self.requests.ids_of_rows(common), self._counts_rows and self.recorder.is_first_rank)
            if TALLIES
            else ()
        )
        if not any(row.is_sparse for row in rows):
            return super().build(common_prefix_len, common, fast_build)
        runs = tuple(self._run_of(common, *run, fast_build) for run in dense_runs(rows))
        slabs = self._slabs(common, rows)
        held, probes = (frozenset(), ()) if self.guard is None else self._guard(self.guard, common, rows, slabs)
        # Last, as the dense backend keeps one persistent buffer for its schedule: the whole batch's must be what stays.
        whole = super().build(common_prefix_len, common, fast_build)
        parts = {f.name: getattr(whole, f.name) for f in fields(whole)}
        return SparsePrefillMetadata(**parts, sparse=SparseStep(slabs, runs, held, probes, spans))

    def _classify(self, common_prefix_len: int, common: CommonAttentionMetadata) -> list[BatchRow]:
        """What each row runs on. Rows as short as a decode's are left to the dense backend: its graphs may run them."""
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        threshold = self.reorder_batch_threshold or 1
        if common.max_query_len <= threshold:  # nothing prefills: nobody asks how long rows are
            return [BatchRow(s, end - s, 0, DECODE_ROW if end > s else PADDING_ROW) for s, end in pairwise(starts)]
        seq_lens, known_levels = compat.host_seq_lens(common), self.requests.levels_of_rows(common)
        levels = known_levels or [SERVER_LEVEL] * common.num_reqs
        prefilling = [True] * common.num_reqs if common.is_prefilling is None else common.is_prefilling.tolist()
        whole = Fallback.UNNAMED if known_levels is None else _reason_of_batch(common_prefix_len, common)
        prefix_lm = common.mm_req_doc_ranges or {}
        rows = []
        for i, (start, end) in enumerate(pairwise(starts)):
            query_len, context_len, level = end - start, seq_lens[i] - (end - start), levels[i].name
            if query_len == 0:
                kind = PADDING_ROW
            elif query_len <= threshold or not prefilling[i]:
                kind = DECODE_ROW
            elif level == EXACT:
                kind = RowKind(DENSE, Fallback.REQUESTED, level)
            elif whole is not None:
                kind = RowKind(DENSE, whole, level)
            elif prefix_lm.get(i):
                kind = RowKind(DENSE, Fallback.PREFIX_LM, level)
            else:
                kind = self._by_length(query_len, seq_lens[i], level)
            min_tokens = self.thresholds[level].min_tokens or 0 if kind.path == SPARSE else 0
            rows.append(BatchRow(start, query_len, context_len, kind, min_tokens, levels[i]))
        return rows

    def _by_length(self, query_len: int, seq_len: int, level: str) -> RowKind:
        thresholds = self.thresholds[level]
        min_tokens = thresholds.min_tokens
        if min_tokens is None:
            return RowKind(DENSE, Fallback.NEVER_FASTER, level)
        if self.memory is None or seq_len <= min_tokens:
            return RowKind(DENSE, Fallback.TOO_SHORT, level)
        sparse_len = min(query_len, seq_len - min_tokens)
        if sparse_len < thresholds.min_query_tokens:
            return RowKind(DENSE, Fallback.SHORT_QUERY, level)
        if not self.memory.room.fits(Row(0, 0, sparse_len, seq_len - sparse_len)):
            return RowKind(DENSE, Fallback.NO_ROOM, level)
        return RowKind(SPARSE, level=level)

    def _count(self, rows: list[BatchRow], common: CommonAttentionMetadata) -> None:
        if not (self._counts_rows and is_counting()):
            return
        prefilled = [(row.context_len, row.seq_len) for row in rows if row.kind.path in (DENSE, SPARSE)]
        pairs = sum(heads * reach.pairs(*span) for reach, heads in self.reaches.items() for span in prefilled)
        self.recorder.count("prefill_pairs", {}, pairs)
        ways = [self._way(row) for row in rows]
        for way in ways:
            self.recorder.count_rows(way)
        for reason in {reason for _, reason, _ in ways if reason is not None} - self._logged:
            self._logged.add(reason)
            logger.info("sparse-prefill: a row prefills dense: %s (said once)", reason.explain)

    def _way(self, row: BatchRow) -> RowKind:
        """What the row counts as: dense where the guard holds every layer that would go sparse."""
        kind = row.kind
        if self.guard is None or kind.path != SPARSE:
            return kind
        places = {(layer, kind.level) for layer in self.layers_at[kind.level]}
        return RowKind(DENSE, Fallback.GUARD, kind.level) if places and places <= self.guard.held else kind

    def _run_of(
        self, common: CommonAttentionMetadata, rows: slice, tokens: slice, fast_build: bool = False
    ) -> DenseRun:
        metadata = super().build(0, self._part_of(common, rows, tokens), fast_build)
        compat.keep_schedule(metadata)
        return DenseRun(rows, tokens, metadata)

    def _guard(
        self, guard: Guard, common: CommonAttentionMetadata, rows: list[BatchRow], slabs: tuple[Slab, ...]
    ) -> tuple[frozenset[Place], tuple[Probe, ...]]:
        """What the guard keeps dense in this step, and what it wants to be checked, level by level.

        A request that sets a smaller p than the server's own gives up what it asks to give up: that is no evidence
        against a layer, or one client could turn the layer dense for all others that set a p.
        """
        probes = []
        judged = [
            slab for slab in slabs if slab.request.kept_mass is None or slab.request.kept_mass >= self.judged_share
        ]
        for level in dict.fromkeys(slab.level for slab in judged):
            number = self.sparse_steps[level]
            self.sparse_steps[level] += 1
            own = self.layers_at[level].intersection(self.sparse_layers)
            if layers := guard.due(own, number):
                tokens = pick_queries(number, [slab for slab in judged if slab.level == level])
                (row,) = (i for i, row in enumerate(rows) if row.token <= tokens.start < row.end)
                probes.append(Probe(level, self._run_of(common, slice(row, row + 1), tokens), layers))
        return guard.held, tuple(probes)

    def _part_of(self, common: CommonAttentionMetadata, rows: slice, tokens: slice) -> CommonAttentionMetadata:
        """Some rows of a batch as a batch of their own; the first and the last of them may be cut.

        Of the first only the last tokens are left then, over all keys, of the last only the first tokens. Made by
        vLLM's own for microbatches, which leaves out what numbers the whole batch's rows or tokens.
        """
        (part,) = split_attn_metadata([UBatchSlice(rows, tokens)], common)
        # Drafts may be shared out among decodes on the device: there one can be longer than the host knows.
        part.max_query_len = max(part.max_query_len, self.reorder_batch_threshold or 1)
        part.max_seq_len = max(compat.host_seq_lens(part))
        part.is_prefilling = None if common.is_prefilling is None else common.is_prefilling[rows]
        return part

    def _slabs(self, common: CommonAttentionMetadata, rows: list[BatchRow]) -> tuple[Slab, ...]:
        """What the dense backend leaves of the rows, level by level, dealt out as they fit into the arena."""
        assert self.memory is not None
        slabs: list[Slab] = []
        requests = {row.request for row in rows if row.is_sparse}
        for request in sorted(requests, key=lambda level: (level.name, level.kept_mass or 0)):
            ids = [i for i, row in enumerate(rows) if row.is_sparse and row.request == request]
            parts = [Row.sparse_of(rows[i], number) for number, i in enumerate(ids)]
            slabs += self.memory.room.slabs(parts, own_block_table(common.block_table_tensor, ids), request)
        return tuple(slabs)


def largest_chunks(vllm_config: VllmConfig) -> tuple[int, int]:
    """Most new tokens that a step may have of one request: alone, and beside as many decodes as there may be."""
    scheduler, drafts = vllm_config.scheduler_config, getattr(vllm_config, "num_speculative_tokens", 0)
    decodes = (scheduler.max_num_seqs - 1) * (1 + drafts)
    most, longest = scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold or MOST_COUNT
    return min(most, longest), max(min(most - decodes, longest), 1)


def _reason_of_batch(common_prefix_len: int, common: CommonAttentionMetadata) -> Fallback | None:
    """Why no row of the batch can go sparse; None if some may."""
    if common.causal is not True:
        return Fallback.NON_CAUSAL
    return Fallback.CASCADE if common_prefix_len > 0 else None
