# SPDX-License-Identifier: Apache-2.0
"""Iteration over a step for reference implementations, row by row or head by head, in float32."""

from collections.abc import Iterator
from typing import Any

import torch

from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows


def rows_of(q: torch.Tensor, cache: PagedCache, rows: Rows) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Iterate over the rows of a step."""
    for row, (token, query_len) in enumerate(zip(rows.query_starts, rows.query_lens, strict=True)):
        keys, _ = cache.gather(rows.block_table[row], rows.seq_lens[row])
        yield row, q[token : token + query_len].float(), keys.float()


def heads_of_rows(
    method: Method, q: torch.Tensor, cache: PagedCache, rows: Rows, heads: torch.Tensor
) -> Iterator[tuple[int, int, Any, torch.Tensor, torch.Tensor]]:
    """Iterate over the rows of a step, and in each row over some heads."""
    group_size = q.shape[1] // cache.num_kv_heads
    methods = method.of_heads(len(heads))
    for row, queries, keys in rows_of(q, cache, rows):
        for head, head_method in zip(heads.tolist(), methods, strict=True):
            yield row, head, head_method, queries[:, head], keys[:, head // group_size]
