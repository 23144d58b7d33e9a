# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel that the plan needs before the server reports ready, so that no request waits for a compiler.

Triton specialises kernels by their integer arguments: 1, a multiple of 16, or any other. Kernels exempt integers that
change from step to step (``do_not_specialize``). The batches here vary nevertheless. If an argument was overlooked, its
variants compile here rather than during a request. Layers also get their engines here (``engine_picker``).
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.config.settings import AUTO
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.arena import consecutive_rows, kernel_rows
from vllm_sparse_backend.serving.worker.compile_monitor import warming_up
from vllm_sparse_backend.serving.worker.engine_picker import EnginePicker, Report
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.step import copy_block_table_rows
from vllm_sparse_kernels import PagedCache, Workspace
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.layer import Layer, run
from vllm_sparse_kernels.pair_counts import add_listed_pairs
from vllm_sparse_kernels.rows import ceil_div

logger = logging.getLogger(LOGGER)

BATCHES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((4096, 320),),
    ((4095, 321), (0, 1), (1024, 1024), (129, 2000)),
    ((0, 2048),),
    ((0, 1),),
)
"""Batches of rows as (context_len, query_len). They cover one and several rows, cached keys or none, full and partial
tiles, and lengths that are 1, a multiple of 16, or any other.
"""


def warm_up(
    impls: Sequence[SparsePrefillImpl],
    spec: AttentionSpec,
    device: torch.device,
    engine: str = AUTO,
    order: Sequence[int] = compat.TOKENS_FIRST,
    gather: Callable[[Report], Sequence[Report]] = lambda report: [report],
) -> None:
    """Choose the engines of each distinct plan, and run all plans over a small cache with vLLM's layout."""
    start = time.monotonic()
    cache, table = _cache_for_batches(spec, device, order)
    picker = EnginePicker(engine)
    with warming_up():
        warm_ups = _warm_ups_by_key(impls, cache, table)
        _choose_engines(warm_ups.values(), picker, gather)
        for distinct in warm_ups.values():
            distinct.run()
        _set_engines(impls, warm_ups)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # vLLM is about to allocate the free memory for the KV cache
    layers = {impl.number: _first_sparse_layer(impl) for impl in impls}
    picker.report({number: layer.engine for number, layer in layers.items()})
    picker.report_selection(layers)
    logger.info("sparse-prefill: kernels of %d plans ready after %.1f s", len(warm_ups), time.monotonic() - start)


def _cache_for_batches(
    spec: AttentionSpec, device: torch.device, order: Sequence[int]
) -> tuple[PagedCache, torch.Tensor]:
    """Return a cache of random keys and values for the longest row of ``BATCHES``, and a block table for most rows."""
    longest = max(context_len + query_len for batch in BATCHES for context_len, query_len in batch)
    num_pages = ceil_div(longest, spec.block_size)
    cache = compat.random_cache(spec, num_pages, device, order)
    table = torch.arange(num_pages, dtype=torch.int32, device=device).repeat(max(map(len, BATCHES)), 1)
    return cache, table


EngineKey = tuple[Layer, bool]
"""The plan of a layer at a level, and whether the layer has learnt sinks. Equal keys get the same engines."""


def _engine_key(impl: SparsePrefillImpl, layer: Layer) -> EngineKey:
    return layer, impl.sinks is not None


def _warm_ups_by_key(
    impls: Sequence[SparsePrefillImpl], cache: PagedCache, table: torch.Tensor
) -> dict[EngineKey, "WarmUp"]:
    """Return a warm-up for each key among all levels of the layers, on the first layer with that key."""
    warm_ups: dict[EngineKey, WarmUp] = {}
    for impl in impls:
        for layer in chain.from_iterable(level.layers for level in impl.levels.values()):
            key = _engine_key(impl, layer)
            if key not in warm_ups:
                warm_ups[key] = WarmUp(impl, layer, cache, table)
    return warm_ups


def _choose_engines(
    warm_ups: Collection["WarmUp"], picker: EnginePicker, gather: Callable[[Report], Sequence[Report]]
) -> None:
    """Choose engines, and choose again until all ranks pass over the same engines."""
    agreed = False
    while not agreed:
        for distinct in warm_ups:
            distinct.choose(picker)
        agreed = picker.settle(gather(picker.passed_over))


def _set_engines(impls: Sequence[SparsePrefillImpl], warm_ups: Mapping[EngineKey, "WarmUp"]) -> None:
    """Give all levels of the layers the engines that were chosen for their keys."""
    for impl in impls:
        with_engines = partial(_with_engines, impl, warm_ups)
        impl.levels = {name: level.map_layers(with_engines) for name, level in impl.levels.items()}


def _with_engines(impl: SparsePrefillImpl, warm_ups: Mapping[EngineKey, "WarmUp"], layer: Layer) -> Layer:
    """Return a layer with the engines that were chosen for its key."""
    return warm_ups[_engine_key(impl, layer)].layer


def _first_sparse_layer(impl: SparsePrefillImpl) -> Layer:
    """Return the layer at the server's own level, or at the first other level if the server's own leaves it dense."""
    return next(level.layer for level in impl.levels.values() if not level.stays_dense)


class WarmUp:
    """Runs a plan over ``BATCHES``. Its engines are chosen on the first batch."""

    def __init__(self, impl: SparsePrefillImpl, layer: Layer, cache: PagedCache, table: torch.Tensor) -> None:
        assert impl.worker is not None
        assert impl.worker.memory is not None
        self.impl, self.layer, self.arena = impl, layer, impl.worker.memory.arena
        self.cache, self.table = cache, table
        # Large enough for some sinks to outweigh all keys, as they do in models.
        self.sinks = None if impl.sinks is None else 10 * torch.rand_like(impl.sinks)

    def _batch(self, lengths: Sequence[tuple[int, int]]) -> Batch:
        rows = kernel_rows(consecutive_rows(lengths), copy_block_table_rows(self.table, list(range(len(lengths)))))
        query = torch.randn(sum(rows.query_lens), self.impl.num_heads, self.cache.head_dim, device=self.table.device)
        dtype = self.cache.keys.dtype
        return Batch(query.to(dtype), self.cache, rows, self.impl.scale, self.impl.out_dtype, self.sinks)

    def choose(self, picker: EnginePicker) -> None:
        """Choose the engines of the plan."""
        batch = self._batch(BATCHES[0])
        layer = replace(self.layer, select_engines=picker.pick_selection(self.layer, batch))
        workspace = Workspace(self.arena.device)
        with workspace.frame():
            call = layer.new_call(batch.q, batch.cache, batch.rows, batch.scale, workspace)
            layer.select(call)
            self.layer = replace(layer, engine=picker.pick(batch, call.index, layer.options))

    def run(self) -> None:
        """Select and attend on every batch, with the engines that were chosen."""
        for batch in map(self._batch, BATCHES):
            workspace = Workspace(self.arena.device)
            with workspace.frame():
                call = self.layer.new_call(batch.q, batch.cache, batch.rows, batch.scale, workspace)
                run(self.layer, call, batch.empty_out(), batch.sinks)
                if not compat.IS_CPU:
                    pairs = torch.zeros(1, dtype=torch.int64, device=batch.q.device)
                    add_listed_pairs(call.index, pairs, 0)
