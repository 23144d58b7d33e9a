"""Compile every kernel that the plan needs before the server reports ready, so that no request waits for a compiler.

Triton compiles a kernel once for each kind of argument: a number may be 1, a multiple of 16 or neither. Kernels declare
numbers that change from step to step as not to be told apart; the batches here are of several kinds all the same, so
that one that was overlooked is met here and not in a request.
"""

import logging
import time
from collections.abc import Iterable, Sequence

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.plugin import LOGGER
from vllm_sparse_backend.serving.arena import Row, make_slab
from vllm_sparse_backend.serving.compilations import warming_up
from vllm_sparse_backend.serving.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.step import own_block_table
from vllm_sparse_backend.settings.plan import LayerPlan
from vllm_sparse_kernels import PagedCache
from vllm_sparse_kernels.rows import ceil_div

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


def warm_up(impls: Iterable[SparsePrefillImpl], spec: AttentionSpec, device: torch.device) -> None:
    """Run select and attend of each distinct plan over a small cache laid out as vLLM's."""
    start = time.monotonic()
    longest = max(context_len + query_len for batch in BATCHES for context_len, query_len in batch)
    most_tokens = max(sum(query_len for _, query_len in batch) for batch in BATCHES)
    num_pages = ceil_div(longest, spec.block_size)
    shape = (num_pages, spec.block_size, spec.num_kv_heads, 2 * spec.head_size)
    cache = PagedCache(*torch.zeros(shape, dtype=spec.dtype, device=device).split(spec.head_size, dim=-1))
    table = torch.arange(num_pages, dtype=torch.int32, device=device).repeat(max(map(len, BATCHES)), 1)
    done: set[LayerPlan] = set()
    with warming_up():
        for impl in impls:
            if impl.groups is None or impl.groups in done:
                continue
            done.add(impl.groups)
            query = torch.randn(most_tokens, impl.num_heads, spec.head_size, dtype=spec.dtype, device=device)
            output = torch.empty_like(query)
            for batch in BATCHES:
                block_table = own_block_table(table, list(range(len(batch))))
                impl.run(make_slab(rows_of(batch), block_table), query, cache, output, counted=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    logger.info("sparse-prefill: kernels of %d plans ready after %.1f s", len(done), time.monotonic() - start)


def rows_of(lengths: Sequence[tuple[int, int]]) -> list[Row]:
    """Rows of (context_len, query_len), one behind the other in q."""
    rows: list[Row] = []
    for context_len, query_len in lengths:
        token = rows[-1].token + rows[-1].query_len if rows else 0
        rows.append(Row(len(rows), token, query_len, context_len))
    return rows
