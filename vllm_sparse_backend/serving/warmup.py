# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel that the plan needs before the server reports ready, so that no request waits for a compiler.

Triton compiles a kernel once for each kind of argument: a number may be 1, a multiple of 16 or neither. Kernels declare
numbers that change from step to step as not to be told apart; the batches here are of several kinds all the same, so
that one that was overlooked is met here and not in a request. Layers get their engines on the way: see ``engines.py``.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.arena import Row, rows_of
from vllm_sparse_backend.serving.compilations import warming_up
from vllm_sparse_backend.serving.engines import EnginePicker
from vllm_sparse_backend.serving.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.step import own_block_table
from vllm_sparse_backend.settings.config import AUTO
from vllm_sparse_kernels import PagedCache, Workspace
from vllm_sparse_kernels.layer import Layer, run
from vllm_sparse_kernels.pairs import add_listed_pairs
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.trial import Batch

logger = logging.getLogger(LOGGER)

BATCHES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((4096, 320),),
    ((4095, 321), (0, 1), (1024, 1024), (129, 2000)),
    ((0, 2048),),
    ((0, 1),),
)
"""Rows of (context_len, query_len): alone and beside others, with and without cached keys, full tiles and such that are
not, lengths that 16 divides and others, and 1.
"""


def warm_up(
    impls: Sequence[SparsePrefillImpl],
    spec: AttentionSpec,
    device: torch.device,
    engine: str = AUTO,
    order: Sequence[int] = compat.TOKENS_FIRST,
) -> None:
    """Run select and attend of each distinct plan over a small cache laid out as vLLM's (``order``: its
    ``compat.page_order``).

    ``engine``: the one that the configuration asks for. Raises ConfigurationError where it cannot be had.
    """
    start = time.monotonic()
    longest = max(context_len + query_len for batch in BATCHES for context_len, query_len in batch)
    num_pages = ceil_div(longest, spec.block_size)
    cache = compat.random_cache(spec, num_pages, device, order)
    table = torch.arange(num_pages, dtype=torch.int32, device=device).repeat(max(map(len, BATCHES)), 1)
    picker = EnginePicker(engine)
    done: dict[tuple[Layer, bool], Layer] = {}
    with warming_up():
        for impl in impls:
            kind = impl.layer, impl.sinks is not None
            if kind not in done:
                done[kind] = _warm_up_layer(impl, cache, table, picker)
            impl.layer = done[kind]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # vLLM is about to take what is left for its own cache
    picker.report({impl.number: impl.layer.engine for impl in impls})
    logger.info("sparse-prefill: kernels of %d plans ready after %.1f s", len(done), time.monotonic() - start)


def _warm_up_layer(impl: SparsePrefillImpl, cache: PagedCache, table: torch.Tensor, picker: EnginePicker) -> Layer:
    """Choose the layer's engine on the first batch, and run all of them on it."""
    assert impl.worker is not None
    assert impl.worker.memory is not None
    layer, memory = impl.layer, impl.worker.memory
    sinks = None if impl.sinks is None else 10 * torch.rand_like(impl.sinks)  # some outweigh all keys, as weights may
    for i, lengths in enumerate(BATCHES):
        rows = rows_of(in_turn(lengths), own_block_table(table, list(range(len(lengths)))))
        query = torch.randn(sum(rows.query_lens), impl.num_heads, cache.head_dim, device=table.device)
        batch = Batch(query.to(cache.keys.dtype), cache, rows, impl.scale, impl.out_dtype, sinks)
        # A server of short requests has a smaller arena than these rows take.
        fits = memory.room.needed(rows) <= memory.room.num_bytes
        workspace = memory.arena if fits else Workspace(table.device)
        if i == 0:
            with workspace.frame():
                index = layer.index(rows, workspace)
                layer.select(batch.q, cache, index, impl.scale)
                layer = replace(layer, engine=picker.pick(batch, index, layer.options))
        with workspace.frame():
            index = run(layer, batch.q, cache, rows, batch.empty_out(), impl.scale, workspace, sinks=sinks)
            if not compat.IS_CPU:
                add_listed_pairs(index, torch.zeros(1, dtype=torch.int64, device=table.device), 0)
    return layer


def in_turn(lengths: Sequence[tuple[int, int]]) -> list[Row]:
    """Rows of (context_len, query_len), one behind the other in q."""
    rows: list[Row] = []
    for context_len, query_len in lengths:
        token = rows[-1].token + rows[-1].query_len if rows else 0
        rows.append(Row(len(rows), token, query_len, context_len))
    return rows
