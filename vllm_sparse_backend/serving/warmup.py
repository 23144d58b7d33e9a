"""Compile every kernel that the plan needs before the server reports ready, so that no request waits for a compiler."""

import logging
import time
from collections.abc import Iterable

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.plugin import LOGGER
from vllm_sparse_backend.serving.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.step import SparseStep
from vllm_sparse_kernels import PagedCache, Rows, attend

logger = logging.getLogger(LOGGER)

CONTEXT_TOKENS, QUERY_TOKENS = 4096, 320
"""One row that has all there is to have: cached keys, full tiles and a last one that is not full."""


def warm_up(impls: Iterable[SparsePrefillImpl], spec: AttentionSpec, max_model_len: int, device: torch.device) -> None:
    """Run select and attend once for each distinct plan, over a small cache laid out as vLLM's."""
    start = time.monotonic()
    page_size, head_dim = spec.block_size, spec.head_size
    num_pages = -(-(CONTEXT_TOKENS + QUERY_TOKENS) // page_size)
    kv = torch.zeros(num_pages, page_size, spec.num_kv_heads, 2 * head_dim, dtype=spec.dtype, device=device)
    cache = PagedCache(*kv.split(head_dim, dim=-1))
    block_table = torch.zeros(1, max(num_pages, -(-max_model_len // page_size)), dtype=torch.int32, device=device)
    block_table[0, :num_pages] = torch.arange(num_pages, dtype=torch.int32, device=device)
    done = set()
    for impl in impls:
        if impl.groups is None or impl.groups in done:
            continue
        done.add(impl.groups)
        step = SparseStep(Rows((0,), (QUERY_TOKENS,), (CONTEXT_TOKENS,), block_table), ())
        query = torch.randn(QUERY_TOKENS, impl.num_heads, head_dim, dtype=spec.dtype, device=device)
        index = step.index(impl.groups, impl.num_heads, impl.block_tokens)
        impl.select(query, cache, index)
        attend(query, cache, index, torch.empty_like(query), impl.scale, options=impl.options)
    torch.cuda.synchronize(device)
    logger.info("sparse-prefill: kernels of %d plans ready after %.1f s", len(done), time.monotonic() - start)
