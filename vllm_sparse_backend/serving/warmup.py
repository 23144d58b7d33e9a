"""Compile every kernel that the plan needs before the server reports ready, so that no request waits for a compiler.

Layers get their engines on the way: see ``engines.py``.
"""

import logging
import time
from collections.abc import Sequence

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.plugin import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.engines import EnginePicker, by_layer
from vllm_sparse_backend.serving.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.step import SparseStep
from vllm_sparse_backend.settings.plan import LayerPlan
from vllm_sparse_kernels import Rows
from vllm_sparse_kernels.attend import Engine
from vllm_sparse_kernels.testing.batches import Batch

logger = logging.getLogger(LOGGER)

CONTEXT_TOKENS, QUERY_TOKENS = 4096, 320
"""One row that has all there is to have: cached keys, full tiles and a last one that is not full."""


def warm_up(
    impls: Sequence[SparsePrefillImpl], spec: AttentionSpec, max_model_len: int, device: torch.device, engine: str
) -> None:
    """Run select and attend once for each distinct plan, over a small cache laid out as vLLM's.

    ``engine``: the one that the configuration asks for. Raises ConfigurationError where it cannot be had.
    """
    start = time.monotonic()
    page_size, head_dim = spec.block_size, spec.head_size
    num_pages = -(-(CONTEXT_TOKENS + QUERY_TOKENS) // page_size)
    cache = compat.random_cache(spec, num_pages, device)
    block_table = torch.zeros(1, max(num_pages, -(-max_model_len // page_size)), dtype=torch.int32, device=device)
    block_table[0, :num_pages] = torch.arange(num_pages, dtype=torch.int32, device=device)
    picker = EnginePicker(engine)
    done: dict[LayerPlan, Engine] = {}
    for impl in impls:
        if impl.groups is None:
            continue
        if impl.groups not in done:
            step = SparseStep(Rows((0,), (QUERY_TOKENS,), (CONTEXT_TOKENS,), block_table), ())
            query = torch.randn(QUERY_TOKENS, impl.num_heads, head_dim, device=device).to(spec.dtype)
            index = step.index(impl.groups, impl.num_heads, impl.block_tokens)
            impl.select(query, cache, index)
            batch = Batch(query, cache, step.rows, impl.scale)
            done[impl.groups] = picker.pick(batch, index, impl.options)
            done[impl.groups].attend(query, cache, index, torch.empty_like(query), impl.scale, options=impl.options)
        impl.engine = done[impl.groups]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    picker.report(by_layer(impls))
    logger.info("sparse-prefill: kernels of %d plans ready after %.1f s", len(done), time.monotonic() - start)
