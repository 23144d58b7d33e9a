# SPDX-License-Identifier: Apache-2.0
"""Iteration over a step for reference implementations, row by row or head by head, in float32."""

from collections.abc import Iterator
from typing import Any

import torch

from vllm_sparse_kernels.call import Call


def rows_of(call: Call) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (row, queries [query_len, num_heads, head_dim], keys [seq_len, num_kv_heads, head_dim])."""
    rows = call.rows
    for row, (token, query_len) in enumerate(zip(rows.query_starts, rows.query_lens, strict=True)):
        keys, _ = call.cache.gather(rows.block_table[row], rows.seq_lens[row])
        yield row, call.q[token : token + query_len].float(), keys.float()


def heads_of_rows(call: Call) -> Iterator[tuple[int, int, Any, torch.Tensor, torch.Tensor]]:
    """Yield (row, head, method, queries [query_len, head_dim], keys [seq_len, head_dim]) of the call's heads."""
    for row, queries, keys in rows_of(call):
        for head, method in zip(call.heads.heads, call.heads.methods, strict=True):
            yield row, head, method, queries[:, head], keys[:, head // call.group]
