# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel that the plan needs before the server reports ready, so that no request waits for a compiler.

Triton specialises kernels by their integer arguments: 1, a multiple of 16, or any other. Kernels exempt integers that
change from step to step (``do_not_specialize``). The batches here vary nevertheless. If an argument was overlooked, its
variants compile here rather than during a request. Layers also get their engines here (``engine_picker``).
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.identity import logger
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.arena import consecutive_rows, kernel_rows
from vllm_sparse_backend.serving.worker.compile_monitor import warming_up
from vllm_sparse_backend.serving.worker.engine_picker import EnginePicker
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.rows import copy_block_table_rows
from vllm_sparse_kernels.attention import engines
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.layer import Layer, run
from vllm_sparse_kernels.rows import ceil_div

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
    engine: str,
    order: Sequence[int],
) -> None:
    """Choose the engines of each distinct plan, and run all plans over a small cache with vLLM's layout."""
    start = time.monotonic()
    batches = _Batches(spec, device, order)
    picker = EnginePicker(engine, engines(compat.flash_attention()))
    chosen: dict[tuple[Layer, bool], Layer] = {}  # by the plan, and whether a layer has learnt sinks
    with warming_up():
        for impl in impls:
            levels = {}
            for name, level in impl.levels.items():
                key = level.layer, impl.sinks is not None
                if key not in chosen:
                    chosen[key] = picker.pick_all(level.layer, batches.of(impl, BATCHES[0]))
                    for lengths in BATCHES:
                        _run(chosen[key], batches.of(impl, lengths))
                levels[name] = replace(level, layer=chosen[key])
            impl.levels = levels
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # vLLM is about to allocate the free memory for the KV cache
    picker.report({impl.number: _first_sparse_layer(impl) for impl in impls})
    logger.info("sparse-prefill: kernels of %d plans ready after %.1f s", len(chosen), time.monotonic() - start)


def _first_sparse_layer(impl: SparsePrefillImpl) -> Layer:
    """Return the layer at the server's own level, or at the first other level if the server's own leaves it dense."""
    return next(level.layer for level in impl.levels.values() if not level.stays_dense)


class _Batches:
    """Random batches over a small cache with vLLM's layout."""

    def __init__(self, spec: AttentionSpec, device: torch.device, order: Sequence[int]) -> None:
        longest = max(context_len + query_len for batch in BATCHES for context_len, query_len in batch)
        num_pages = ceil_div(longest, spec.block_size)
        self.cache = compat.random_cache(spec, num_pages, device, order)
        self.table = torch.arange(num_pages, dtype=torch.int32, device=device).repeat(max(map(len, BATCHES)), 1)

    def of(self, impl: SparsePrefillImpl, lengths: Sequence[tuple[int, int]]) -> Batch:
        """Return a batch of rows of (context_len, query_len) for a layer."""
        rows = kernel_rows(consecutive_rows(lengths), copy_block_table_rows(self.table, list(range(len(lengths)))))
        query = torch.randn(sum(rows.query_lens), impl.num_heads, self.cache.head_dim, device=self.table.device)
        # Large enough for some sinks to outweigh all keys, as they do in models.
        sinks = None if impl.sinks is None else 10 * torch.rand_like(impl.sinks)
        return Batch(query.to(self.cache.keys.dtype), self.cache, rows, impl.scale, impl.out_dtype, sinks)


def _run(layer: Layer, batch: Batch) -> None:
    """Select, attend and count pairs."""
    call = layer.new_call(batch.q, batch.cache, batch.rows, batch.scale)
    run(layer, call, batch.empty_out(), batch.sinks)
    call.index.add_listed_pairs(torch.zeros(1, dtype=torch.int64, device=batch.rows.device), 0)
