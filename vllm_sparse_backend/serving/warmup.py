# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel that the plan needs before the server reports ready, so that no request waits for a compiler.

Triton compiles a kernel once for each kind of argument: a number may be 1, a multiple of 16 or neither. Kernels declare
numbers that change from step to step as not to be told apart; the batches here are of several kinds all the same, so
that one that was overlooked is met here and not in a request. Layers get their engines on the way: see ``engines.py``.
"""

import logging
import time
from collections.abc import Sequence

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.arena import Row, make_slab
from vllm_sparse_backend.serving.compilations import warming_up
from vllm_sparse_backend.serving.engines import EnginePicker
from vllm_sparse_backend.serving.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.step import own_block_table
from vllm_sparse_backend.settings.config import AUTO
from vllm_sparse_backend.settings.plan import LayerPlan
from vllm_sparse_kernels import PagedCache, Workspace
from vllm_sparse_kernels.attend import Engine
from vllm_sparse_kernels.pairs import add_listed_pairs
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.testing.batches import Batch

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
    done: dict[LayerPlan, Engine] = {}
    with warming_up():
        for impl in impls:
            if impl.groups is None:
                continue
            if impl.groups not in done:
                done[impl.groups] = _warm_up_layer(impl, cache, table, picker)
            impl.engine = done[impl.groups]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # vLLM is about to take what is left for its own cache
    picker.report({impl.layer: impl.engine for impl in impls if impl.groups is not None})
    logger.info("sparse-prefill: kernels of %d plans ready after %.1f s", len(done), time.monotonic() - start)


def _warm_up_layer(impl: SparsePrefillImpl, cache: PagedCache, table: torch.Tensor, picker: EnginePicker) -> Engine:
    """Choose the layer's engine on the first batch, and run all of them on it."""
    assert impl.groups is not None
    assert impl.memory is not None
    for i, lengths in enumerate(BATCHES):
        slab = make_slab(rows_of(lengths), own_block_table(table, list(range(len(lengths)))))
        num_tokens = sum(slab.rows.query_lens)
        query = torch.randn(num_tokens, impl.num_heads, cache.head_dim, device=table.device).to(cache.keys.dtype)
        batch = Batch(query, cache, slab.rows, impl.scale, impl.out_dtype)
        # A server of short requests has a smaller arena than these rows take.
        fits = impl.memory.room.needed(slab) <= impl.memory.room.num_bytes
        workspace = impl.memory.arena if fits else Workspace(table.device)
        if i == 0:
            with workspace.frame():
                index = slab.index(impl.groups, impl.num_heads, impl.block_tokens, workspace)
                impl.select(query, cache, index)
                impl.engine = picker.pick(batch, index, impl.options)
        with workspace.frame():
            index = impl.select_and_attend(slab, query, cache, batch.empty_out(), workspace)
            if not compat.IS_CPU:
                add_listed_pairs(index, torch.zeros(1, dtype=torch.int64, device=table.device), 0)
    return impl.engine


def rows_of(lengths: Sequence[tuple[int, int]]) -> list[Row]:
    """Rows of (context_len, query_len), one behind the other in q."""
    rows: list[Row] = []
    for context_len, query_len in lengths:
        token = rows[-1].token + rows[-1].query_len if rows else 0
        rows.append(Row(len(rows), token, query_len, context_len))
    return rows
