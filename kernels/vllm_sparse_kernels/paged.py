# SPDX-License-Identifier: Apache-2.0
"""The paged key-value cache. Only this module converts positions to addresses.

The key at position p of row i is on page ``block_table[i, p // page_size]`` at offset ``p % page_size``. Kernels
compute this address with ``key_offsets``; references gather all keys of a row.

A cache may be in fp8 (e4m3). Queries are then also in fp8, and each element must be multiplied by a scale. Methods and
engines use q and k only in products, so the caller multiplies the softmax's scale by the scales of queries and keys.
Attention applies the scale of values. Products of q and k are computed in fp8, and everything else in fp16, which
represents all numbers of e4m3 exactly.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.vectors import padded_mask

FP8 = torch.float8_e4m3fn

USUAL_PAGE_SIZE = 16
"""vLLM's page size by default, and the smallest on GPUs."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for means and weights of elements."""
    return torch.float16 if dtype == FP8 else dtype


@lru_cache(maxsize=64)
def padded_dim(head_dim: int) -> int:
    """Return head_dim rounded up to a power of two, which Triton's own function takes 2 µs to compute."""
    return int(triton.next_power_of_2(head_dim))


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of one layer.

    Attributes:
        keys: [num_pages, page_size, num_kv_heads, head_dim] view with any strides.
        values: View of the same shape.
        score_scale: Scale of queries times scale of keys. Callers pass methods and engines the softmax's scale times
            this factor.
        value_scale: Scale of values, by which attention multiplies its result.
    """

    keys: torch.Tensor
    values: torch.Tensor
    score_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def page_size(self) -> int:
        """Keys of a page."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Elements of a head's key or value."""
        return self.keys.shape[3]

    @property
    def padded_head_dim(self) -> int:
        """``head_dim`` rounded up to a power of two."""
        return padded_dim(self.head_dim)

    @cached_property
    def strides(self) -> tuple[int, int, int]:
        """(page, token, head) strides in elements, the same for keys and values.

        Raises ValueError if they differ, or if a head's elements are not contiguous.
        """
        if self.keys.stride() != self.values.stride() or self.keys.stride(3) != 1:
            raise ValueError(
                f"PagedCache: given keys with strides {self.keys.stride()} and values with strides "
                f"{self.values.stride()}, expected equal strides, and 1 for head_dim"
            )
        page, token, head, _ = self.keys.stride()
        return page, token, head

    @cached_property
    def last_offset(self) -> int:
        """Offset of the last key or value of the last page and kv head, in elements."""
        return sum((size - 1) * stride for size, stride in zip(self.keys.shape, self.strides))

    def gather(self, block_table_row: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the first positions of a row with pages ``block_table_row`` [max_pages] int32.

        Returns keys and values, both [seq_len, num_kv_heads, head_dim].
        """
        pages = block_table_row[: ceil_div(seq_len, self.page_size)].long()
        return tuple(x[pages].flatten(0, 1)[:seq_len] for x in (self.keys, self.values))  # type: ignore[return-value]


class QueryArgs(NamedTuple):
    """Queries as arguments of kernels; head_dim is contiguous."""

    q: Any
    stride_token: int
    stride_head: int


def query_args(q: torch.Tensor) -> QueryArgs:
    """Build the arguments of kernels that read queries."""
    return QueryArgs(q, q.stride(0), q.stride(1))


class KeyArgs(NamedTuple):
    """Keys and their block table as arguments of kernels."""

    k: Any
    stride_page: int
    stride_token: int
    stride_head: int
    page_size: int
    block_table: Any
    stride_table: int
    v: Any = None


def key_args(cache: PagedCache, block_table: torch.Tensor, values: bool = False) -> KeyArgs:
    """Build the arguments of kernels that read keys."""
    v = cache.values if values else None
    return KeyArgs(cache.keys, *cache.strides, cache.page_size, block_table, block_table.stride(0), v)


class KeySource(NamedTuple):
    """The keys of one row and kv head, in kernels."""

    keys: Any  # KeyArgs
    i_row: Any
    i_kv: Any
    end: Any  # position where keys end


@triton.jit
def key_offsets(block_table_ptr, positions, mask, page_size, stride_page, stride_token):
    """Return the element offsets of keys in the cache, int64, without the offsets of head and dimension."""
    page = tl.load(block_table_ptr + positions // page_size, mask=mask, other=0).to(tl.int64)
    return page * stride_page + tl.where(mask, positions % page_size, 0).to(tl.int64) * stride_token


@triton.jit
def widen(b_x):
    """Convert fp8 elements to fp16; return others unchanged."""
    if b_x.dtype == tl.float8e4nv:
        return b_x.to(tl.float16)
    else:
        return b_x


@triton.jit
def load_queries(queries, i_head, token, length, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the queries [BLOCK_M, BLOCK_D] of a head."""
    o_m = tl.arange(0, BLOCK_M)
    return load_queries_at(queries, i_head, token + o_m, o_m < length, HEAD_DIM, BLOCK_D)


@triton.jit
def load_queries_at(queries, i_head, o_q, mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load queries [len(o_q), BLOCK_D] of a head. If queries have different heads, ``i_head`` is [len(o_q), 1]."""
    o_d = tl.arange(0, BLOCK_D)
    return tl.load(
        queries.q + o_q.to(tl.int64)[:, None] * queries.stride_token + i_head * queries.stride_head + o_d[None, :],
        mask=padded_mask(mask, HEAD_DIM, BLOCK_D), other=0.0,
    )  # fmt: skip


@triton.jit
def store_outputs(args, i_head, o_q, mask, b_out, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the outputs [len(o_q), BLOCK_D] of queries of a head, in ``AttendArgs.out``."""
    o_d = tl.arange(0, BLOCK_D)
    tl.store(
        args.out + o_q.to(tl.int64)[:, None] * args.stride_out_token + i_head * args.stride_out_head + o_d[None, :],
        b_out.to(args.out.dtype.element_ty), mask=padded_mask(mask, HEAD_DIM, BLOCK_D),
    )  # fmt: skip


@triton.jit
def load_keys(keys, i_row, i_kv, o_n, end, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load keys [len(o_n), BLOCK_D] of one row and kv head."""
    o_d = tl.arange(0, BLOCK_D)
    table = keys.block_table + tl.cast(i_row, tl.int64) * keys.stride_table
    o_k = key_offsets(table, o_n, o_n < end, keys.page_size, keys.stride_page, keys.stride_token)
    base = keys.k + i_kv.to(tl.int64) * keys.stride_head
    return tl.load(base + o_k[:, None] + o_d[None, :], mask=padded_mask(o_n < end, HEAD_DIM, BLOCK_D), other=0.0)
