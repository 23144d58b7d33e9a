# SPDX-License-Identifier: Apache-2.0
"""A captured prompt in the chunks in which a server prefills it: rows, pages, and what a layer selects for one."""

from functools import lru_cache

import torch
import torch.nn.functional as F

from vllm_sparse_backend.profiling.capture import LayerTensors
from vllm_sparse_backend.settings.config import AUTO
from vllm_sparse_backend.settings.plan import LayerPlan, methods_by_head
from vllm_sparse_kernels import PagedCache, Rows, SparseIndex
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.width import index_block_tokens

PAGE_TOKENS = 128


def chunk_rows(num_tokens: int, chunk_tokens: int, device: torch.device, min_tokens: int = 0) -> list[Rows]:
    """The steps in which a server prefills the prompt, its pages in order, less the first ``min_tokens`` positions.

    A chunk that crosses that border is cut in two there.
    """
    table = torch.arange(ceil_div(num_tokens, PAGE_TOKENS), dtype=torch.int32, device=device)[None]
    spans = [
        (max(start, min_tokens), min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)
    ]
    return [Rows((0,), (end - begin,), (begin,), table) for begin, end in spans if begin < end]


def select_layer(groups: LayerPlan, q: torch.Tensor, cache: PagedCache, rows: Rows, scale: float) -> SparseIndex:
    """What the groups of one layer select, as the attention layer in the server does it."""
    index = layer_index(groups, q, cache, rows)
    fill_index(groups, q, cache, index, scale)
    return index


def layer_index(groups: LayerPlan, q: torch.Tensor, cache: PagedCache, rows: Rows, engine: str = AUTO) -> SparseIndex:
    """Room for what the groups of one layer select, as in a server that is asked for this engine."""
    block_tokens = index_block_tokens(methods_by_head(groups), cache.head_dim, q.device, engine)
    layouts = {}
    for group in groups:
        layouts.update(dict.fromkeys(group.heads, group.method.stripe_layout(rows)))
    return SparseIndex.allocate(rows, q.shape[1], block_tokens, layouts)


def fill_index(groups: LayerPlan, q: torch.Tensor, cache: PagedCache, index: SparseIndex, scale: float) -> None:
    """Select for all heads of a layer. On a CUDA device nothing here waits for it."""
    for group in groups:
        heads = _head_ids(group.heads, q.device)
        if q.is_cuda:
            group.method.select(q, cache, index, heads, scale)
        else:
            METHODS[name_of(group.method)].reference(group.method, q, cache, index, heads, scale)


@lru_cache(maxsize=1024)
def _head_ids(heads: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32, copied to the device once: a copy in each step would wait for it."""
    return torch.tensor(heads, dtype=torch.int32, device=device)


def dense_attention(tensors: LayerTensors, scale: float) -> torch.Tensor:
    """Causal attention over all keys: [num_tokens, num_heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in tensors)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def paged(x: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_kv_heads, head_dim] as pages; places past the end are NaN."""
    padding = -len(x) % PAGE_TOKENS
    return F.pad(x, (0, 0, 0, 0, 0, padding), value=float("nan")).unflatten(0, (-1, PAGE_TOKENS))
