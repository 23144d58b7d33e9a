# SPDX-License-Identifier: Apache-2.0
"""Iteration over a step for reference implementations, row by row or head by head, in float32."""

from collections.abc import Iterator
from typing import Any

import torch

from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows


def rows_of(q: torch.Tensor, cache: PagedCache, rows: Rows) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Iterate over the rows of a step.

    Args:
        q: [num_tokens, num_heads, head_dim] queries of the step.
        cache: Keys and values of the layer.
        rows: The rows.

    Yields:
        The row's number, its new queries [query_len, num_heads, head_dim] and its keys
        [seq_len, num_kv_heads, head_dim], both float32.
    """
    for row, (token, query_len) in enumerate(zip(rows.query_starts, rows.query_lens, strict=True)):
        keys, _ = cache.gather(rows.block_table[row], rows.seq_lens[row])
        yield row, q[token : token + query_len].float(), keys.float()


def heads_of_rows(
    method: Method, q: torch.Tensor, cache: PagedCache, rows: Rows, heads: torch.Tensor
) -> Iterator[tuple[int, int, Any, torch.Tensor, torch.Tensor]]:
    """Iterate over the rows of a step, and in each row over some heads.

    Args:
        method: The method that selects these heads, which may be a merger.
        q: [num_tokens, num_heads, head_dim] queries of the step.
        cache: Keys and values of the layer.
        rows: The rows.
        heads: [n] numbers of query heads.

    Yields:
        The row's number, the head's number, the head's method, its new queries [query_len, head_dim] and its keys
        [seq_len, head_dim], both float32.
    """
    group_size = q.shape[1] // cache.num_kv_heads
    methods = method.of_heads(len(heads))
    for row, queries, keys in rows_of(q, cache, rows):
        for head, head_method in zip(heads.tolist(), methods, strict=True):
            yield row, head, head_method, queries[:, head], keys[:, head // group_size]
