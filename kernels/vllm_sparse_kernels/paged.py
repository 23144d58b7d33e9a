# SPDX-License-Identifier: Apache-2.0
"""The paged key-value cache, and the one place where a position becomes an address.

A position p of row i lies on page ``block_table[i, p // page_size]`` at offset ``p % page_size``. Kernels resolve that
with ``key_offsets`` below; the references gather a row's keys whole.

A cache may be in fp8 (e4m3). Its queries are then in fp8 too, and an element stands for itself times a scale: that of
queries and keys together is for the caller to fold into the softmax's scale, as every method and engine sees q and k in
products alone; that of values is applied by whoever reads them. Products of q and k are taken in fp8 as they are. What
is not such a product is computed in fp16, which holds all numbers of e4m3.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.rows import ceil_div

SPLIT_TOKENS = 1024
"""Keys that one program adds up for their mean."""

FP8 = torch.float8_e4m3fn


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what means and weights of such elements are kept in: fp16 for fp8, else their own.

    Args:
        dtype: of queries and keys.

    Returns:
        A dtype of 16 bits or more.
    """
    return torch.float16 if dtype == FP8 else dtype


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of one layer: logical [num_pages, page_size, num_kv_heads, head_dim] views, any strides."""

    keys: torch.Tensor
    values: torch.Tensor

    score_scale: float = 1.0
    """What q·k of elements counts, the queries' scale times the keys': a caller gives methods and engines the
    softmax's scale times this."""

    value_scale: float = 1.0
    """What an element of a value counts: attention multiplies its result by it."""

    def __post_init__(self) -> None:
        if self.keys.dim() != 4 or self.keys.shape != self.values.shape:
            raise ValueError(
                "PagedCache: keys and values must both be [num_pages, page_size, num_kv_heads, head_dim], given "
                f"{tuple(self.keys.shape)} and {tuple(self.values.shape)}"
            )

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Kv heads."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.keys.shape[3]

    @property
    def strides(self) -> tuple[int, int, int]:
        """(page, token, head) strides in elements, the same for keys and values, for kernels.

        Raises ValueError where keys and values differ in strides or a head's elements are not contiguous.
        """
        if self.keys.stride() != self.values.stride() or self.keys.stride(3) != 1:
            raise ValueError(
                "PagedCache: kernels need keys and values of equal strides with contiguous head_dim, given strides "
                f"{self.keys.stride()} and {self.values.stride()}"
            )
        page, token, head, _ = self.keys.stride()
        return page, token, head

    def gather(self, block_table_row: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one row's first positions.

        Args:
            block_table_row: [max_pages] int32.
            seq_len: positions.

        Returns:
            Keys and values: two [seq_len, num_kv_heads, head_dim] copies.
        """
        pages = block_table_row[: ceil_div(seq_len, self.page_size)].long()
        return tuple(x[pages].flatten(0, 1)[:seq_len] for x in (self.keys, self.values))  # type: ignore[return-value]


class QueryArgs(NamedTuple):
    """Queries by pointer, head_dim contiguous: for kernels."""

    q: Any
    stride_token: int
    stride_head: int


def query_args(q: torch.Tensor) -> QueryArgs:
    """Return queries for kernels.

    Args:
        q: [num_tokens, num_heads, head_dim], head_dim contiguous.

    Returns:
        Pointer and strides.
    """
    return QueryArgs(q, q.stride(0), q.stride(1))


class KeyArgs(NamedTuple):
    """Keys by pointer, and the block table that places them: for kernels. ``v``: values, for those that read them."""

    k: Any
    stride_page: int
    stride_token: int
    stride_head: int
    page_size: int
    block_table: Any
    stride_table: int
    v: Any = None


def key_args(cache: PagedCache, block_table: torch.Tensor, values: bool = False) -> KeyArgs:
    """Return keys for kernels.

    Args:
        cache: keys and values, pages of [page_size, num_kv_heads, head_dim].
        block_table: [num_rows, max_pages], or one row's [max_pages], of which kernels then read no other.
        values: whether the kernel reads values.

    Returns:
        Pointers, strides and the block table.
    """
    stride_table = block_table.stride(0) if block_table.dim() == 2 else 0
    v = cache.values if values else None
    return KeyArgs(cache.keys, *cache.strides, cache.page_size, block_table, stride_table, v)


@triton.jit
def key_offsets(block_table_ptr, positions, mask, page_size, stride_page, stride_token):
    """Return where one row's keys lie in the cache, less the head's and the dimension's part.

    Args:
        block_table_ptr: pointer to the row's first page.
        positions: int32, of keys.
        mask: which positions there are.
        page_size: tokens of a page.
        stride_page: elements.
        stride_token: elements.

    Returns:
        int64, in elements; 0, which is always readable, where masked.
    """
    page = tl.load(block_table_ptr + positions // page_size, mask=mask, other=0).to(tl.int64)
    return page * stride_page + tl.where(mask, positions % page_size, 0).to(tl.int64) * stride_token


@triton.jit
def widen(b_x):
    """Return fp8 elements as fp16, anything else as it is.

    Args:
        b_x: any block.

    Returns:
        A block of the same shape.
    """
    if b_x.dtype == tl.float8e4nv:
        return b_x.to(tl.float16)
    else:
        return b_x


@triton.jit
def load_queries(queries, i_head, token, length, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load queries of one head.

    Args:
        queries: QueryArgs.
        i_head: the query head.
        token: the first one's token in q.
        length: queries that there are.
        BLOCK_M: queries that are loaded.
        HEAD_DIM: channels of a head.
        BLOCK_D: HEAD_DIM rounded up to a power of two.

    Returns:
        [BLOCK_M, BLOCK_D], 0 from ``length`` on.
    """
    o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_q = (token + o_m).to(tl.int64)
    return tl.load(
        queries.q + o_q[:, None] * queries.stride_token + i_head * queries.stride_head + o_d[None, :],
        mask=(o_m < length)[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip


@triton.jit
def load_keys(keys, i_row, i_kv, o_n, end, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load keys of one row and kv head.

    Args:
        keys: KeyArgs.
        i_row: a row of the step.
        i_kv: the kv head.
        o_n: positions.
        end: where the row's keys end.
        HEAD_DIM: channels of a head.
        BLOCK_D: HEAD_DIM rounded up to a power of two.

    Returns:
        [positions, BLOCK_D], 0 from ``end`` on.
    """
    o_d = tl.arange(0, BLOCK_D)
    table = keys.block_table + tl.cast(i_row, tl.int64) * keys.stride_table
    o_k = key_offsets(table, o_n, o_n < end, keys.page_size, keys.stride_page, keys.stride_token)
    base = keys.k + i_kv.to(tl.int64) * keys.stride_head
    return tl.load(base + o_k[:, None] + o_d[None, :], mask=(o_n < end)[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_block(
    keys, i_row, i_kv, start, end,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load BLOCK consecutive keys of one row and kv head: those of a page by one address.

    Args:
        keys: KeyArgs.
        i_row: a row of the step.
        i_kv: the kv head.
        start: position of the first, a multiple of BLOCK.
        end: where the row's keys end.
        PAGE: tokens of a page.
        BLOCK: keys.
        HEAD_DIM: channels of a head.
        BLOCK_D: HEAD_DIM rounded up to a power of two.

    Returns:
        [BLOCK, BLOCK_D], 0 from ``end`` on.
    """
    start = tl.cast(start, tl.int32)  # the interpreter's loops count in Python's integers
    o_n, o_d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    mask = (start + o_n < end)[:, None] & (o_d < HEAD_DIM)[None, :]
    if PAGE % BLOCK == 0:
        table = keys.block_table + tl.cast(i_row, tl.int64) * keys.stride_table
        page = tl.load(table + start // PAGE, mask=start < end, other=0).to(tl.int64)
        base = keys.k + i_kv.to(tl.int64) * keys.stride_head + page * keys.stride_page
        base += start % PAGE * keys.stride_token
        return tl.load(base + (o_n * keys.stride_token)[:, None] + o_d[None, :], mask=mask, other=0.0)
    else:
        return load_keys(keys, i_row, i_kv, start + o_n, end, HEAD_DIM, BLOCK_D)


def key_means(cache: PagedCache, block_table: torch.Tensor, row: int, seq_len: int) -> torch.Tensor:
    """Return the mean of one row's first ``seq_len`` keys.

    Args:
        cache: keys and values, pages of [page_size, num_kv_heads, head_dim].
        block_table: [num_rows, max_pages] int32.
        row: a row of the step.
        seq_len: keys of the row.

    Returns:
        [num_kv_heads, head_dim padded to a power of two] float32.
    """
    block_d, num_splits = triton.next_power_of_2(cache.head_dim), ceil_div(seq_len, SPLIT_TOKENS)
    sums = torch.empty(num_splits, cache.num_kv_heads, block_d, dtype=torch.float32, device=block_table.device)
    _key_sums_kernel[(num_splits, cache.num_kv_heads)](
        key_args(cache, block_table), sums, row, seq_len,
        HEAD_DIM=cache.head_dim, BLOCK_D=block_d, SPLIT=SPLIT_TOKENS, BLOCK_N=64,
    )  # fmt: skip
    return sums.sum(0) / seq_len


@triton.jit(do_not_specialize=("i_row", "seq_len"))
def _key_sums_kernel(
    keys, sums, i_row, seq_len,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum up to SPLIT keys of one kv head of one row.

    Grid: (splits, kv heads). Bound by memory: it reads each key once.

    Args:
        keys: KeyArgs.
        sums: [splits, kv heads, BLOCK_D] float32; written.
        i_row: a row of the step.
        seq_len: keys of the row.
        HEAD_DIM: channels of a head.
        BLOCK_D: HEAD_DIM rounded up to a power of two.
        SPLIT: keys of a program.
        BLOCK_N: keys of a step.
    """
    i_split, i_kv = tl.program_id(0), tl.program_id(1)
    b_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(i_split * SPLIT, tl.minimum(i_split * SPLIT + SPLIT, seq_len), BLOCK_N):
        b_sum += load_keys(keys, i_row, i_kv, i + tl.arange(0, BLOCK_N), seq_len, HEAD_DIM, BLOCK_D).to(tl.float32)
    o_sum = (i_split * tl.num_programs(1) + i_kv) * BLOCK_D + tl.arange(0, BLOCK_D)
    tl.store(sums + o_sum, tl.sum(b_sum, 0))
