# SPDX-License-Identifier: Apache-2.0
"""How references walk over a step: row by row, or head by head of each row, in float32."""

from collections.abc import Iterator
from typing import Any

import torch

from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows


def rows_of(q: torch.Tensor, cache: PagedCache, rows: Rows) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each row, its new queries [query_len, num_heads, head_dim] and its keys [seq_len, num_kv_heads, head_dim].

    Args:
        q: [num_tokens, num_heads, head_dim].
        cache: keys and values, pages of [page_size, num_kv_heads, head_dim].
        rows: the rows of a step.
    """
    for row, (token, query_len) in enumerate(zip(rows.tokens, rows.query_lens, strict=True)):
        keys, _ = cache.gather(rows.block_table[row], rows.seq_lens[row])
        yield row, q[token : token + query_len].float(), keys.float()


def heads_of_rows(
    method: Method, q: torch.Tensor, cache: PagedCache, rows: Rows, heads: torch.Tensor
) -> Iterator[tuple[int, int, Any, torch.Tensor, torch.Tensor]]:
    """Of each row each of ``heads``: both, the head's own method, its queries and keys [n, head_dim].

    Args:
        method: the method of all heads.
        q: [num_tokens, num_heads, head_dim], in the cache's dtype.
        cache: keys and values, pages of [page_size, num_kv_heads, head_dim].
        rows: the rows of a step.
        heads: [n] int32 on the device, the query heads that are selected.
    """
    group, settings = q.shape[1] // cache.num_kv_heads, method.of_heads(len(heads))
    for row, queries, keys in rows_of(q, cache, rows):
        for head, head_method in zip(heads.tolist(), settings, strict=True):
            yield row, head, head_method, queries[:, head], keys[:, head // group]
