# SPDX-License-Identifier: Apache-2.0
"""Means in place of dropped blocks: past what a tile keeps, a head may attend to the means of what it drops.

A *mean block* is up to 64 consecutive keys of one block of the index. Where a tile drops n of its keys, each of the
tile's queries takes them for n keys that all are the block's mean key k̄ and have its mean value v̄: they enter softmax
with the score scale · q·k̄ + ln n. (FlashPrefill V2 calls it a zero-order correction: the first term of the expansion of
exp(q·k) around the mean.) No key is counted twice:

* A block that is kept is kept whole, and stands for nothing.
* Of a dropped block of which s keys are kept as stripes, the n = size − s others count, and for their mean the mean of
  the whole block is taken: theirs would be another one for each head and tile, and cost as much as the stripes again.
* Only blocks wholly before the tile's first query have means. The diagonal's are always kept.

So with a full index nothing changes, bit for bit. Whether a head gains is for calibration to say: means of blocks whose
keys are unlike each other stand for too little (by Jensen's inequality). Measured on a trained 29M model of 8 layers
(one chunk of 3,072 tokens of code, float32, equal index), ‖O − Õ‖₂ / ‖O‖₂ with means over that without, layer by layer:

* vertical-slash (64 verticals, 128 slashes; density 0.29 to 0.39) 1.26 0.77 0.50 0.79 0.62 0.99 0.75 0.85
* SpargeAttn (τ 0.6, θ −1; density 0.09 to 0.29) 1.17 0.76 0.81 0.76 0.77 0.97 0.71 0.79
* SALE (τ 0.1; density 0.13 to 0.54) 1.26 0.68 0.51 0.60 0.53 0.89 0.64 0.73

Every head gained in every layer but the first, where one of eight did. Taking stripes out of their blocks' means was
tried in the first layers: it changed vertical-slash's errors by under a hundredth, and AnchorAttention's (θ 4) from
0.0988 to 0.0945 in the first layer (0.0995 without means), from 0.0422 to 0.0424 in the second (0.0587 without).

It is a second pass, after any engine that returns the log-sum-exp, and goes on with the online softmax where that one
ended: out and log-sum-exp are what it begins with, and what it writes. The result's rounding to out's dtype thus
happens twice. Three launches: the means of all blocks, once for each kv head that such a head reads; how many keys each
(head, tile) drops of every block; the pass itself, a sixty-fourth of dense attention's products.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.compiler.compiler import max_shared_mem

from vllm_sparse_kernels.attend.options import AttendOptions
from vllm_sparse_kernels.index import LayerShape, SparseIndex, padded_capacity
from vllm_sparse_kernels.paged import KeyArgs, PagedCache, key_args, key_offsets, wide_dtype, widen
from vllm_sparse_kernels.rows import KEY_ALIGN, ROW_FIELDS, TILE_FIELDS, TILE_TOKENS, Rows, ceil_div
from vllm_sparse_kernels.workspace import padded_bytes

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

LSE_ALIGN = 16
"""Log-sum-exps' rows are whole multiples of it: engines take them by tuples of arguments, whose integers Triton
specializes whatever it is told, by 1 and by whole sixteens.
"""

VARYING = ("num_means", "stride_dropped", "stride_lse")
"""Kernel arguments that change from step to step: they shall not call for new variants of a kernel."""


def asking(options: AttendOptions | None, means: Sequence[bool], device: torch.device) -> AttendOptions | None:
    """``options``, and means for the heads where ``means`` is true; None where no head asks for anything.

    Waits for the device: not for a step.
    """
    if not any(means):
        return options
    mean_heads = torch.tensor(means, dtype=torch.uint8, device=device)
    return replace(options or AttendOptions(None, None), mean_heads=mean_heads)


def over_index(options: AttendOptions | None) -> AttendOptions | None:
    """What is asked of attention over the index itself; None where it is exact."""
    if options is None:
        return None
    rest = replace(options, mean_heads=None)
    return rest if any(isinstance(getattr(rest, f.name), torch.Tensor) for f in fields(rest)) else None


class QueryArgs(NamedTuple):
    """q, out of its shape, and their strides."""

    q: Any
    out: Any
    stride_token: int
    stride_head: int
    stride_out_token: int
    stride_out_head: int


class ListArgs(NamedTuple):
    """Tensors of Rows and SparseIndex; the list of blocks has a length of a multiple of 16."""

    tiles: Any
    order: Any
    row_table: Any
    block_counts: Any
    block_ids: Any
    block_offsets: Any
    stride_blocks: int
    stripe_counts: Any
    stripe_positions: Any
    stripe_offsets: Any


class Means(NamedTuple):
    """What the first two launches make. What belongs to heads that do not ask for it is undefined."""

    keys: torch.Tensor
    """[num_kv_heads, num_means, head_dim] of the cache's dtype, or fp16, row after row as Rows.key_starts."""

    values: torch.Tensor  # like keys, scaled as the result is
    dropped: (
        torch.Tensor
    )  # [num_heads, block_capacity · means a block] uint8: keys that a mean stands for, as block_ids
    totals: torch.Tensor  # [num_heads, num_tiles] int32: sums of dropped


def mean_tokens(block_tokens: int) -> int:
    """Keys of a mean block, of an index with blocks of ``block_tokens``."""
    return min(block_tokens, KEY_ALIGN)


def attend_to_means(
    q: torch.Tensor,
    cache: PagedCache,
    index: SparseIndex,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    mean_heads: torch.Tensor,
) -> None:
    """Of the heads where ``mean_heads`` [num_heads] uint8 is set, go on with softmax over the means.

    q, out, lse and scale > 0 as in ``engine.Attend``; out and lse hold the attention over the index, and are changed.
    Raises ValueError where there is not one flag for each head.
    """
    if mean_heads.shape != (index.num_heads,):
        raise ValueError(f"AttendOptions: mean_heads is {tuple(mean_heads.shape)}, expected ({index.num_heads},)")
    means = make_means(cache, index, mean_heads)
    queries = QueryArgs(q, out, q.stride(0), q.stride(1), out.stride(0), out.stride(1))
    head_dim, group = cache.head_dim, index.num_heads // cache.num_kv_heads
    block_d = triton.next_power_of_2(head_dim)
    chunk, num_stages = _tiling(block_d, q.device)
    _attend_to_means_kernel[(index.rows.num_tiles * index.num_heads,)](
        queries, _list_args(index), mean_heads, *means, lse, scale * LOG2_E.value,
        means.keys.shape[1], means.dropped.stride(0), lse.stride(0),
        HEAD_DIM=head_dim, BLOCK_D=block_d, NUM_HEADS=index.num_heads, GROUP=group, BLOCK_M=TILE_TOKENS, CHUNK=chunk,
        **_widths(index), PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8 if block_d >= 128 else 4, num_stages=num_stages,
    )  # fmt: skip


def make_means(cache: PagedCache, index: SparseIndex, mean_heads: torch.Tensor) -> Means:
    """Means of all rows' whole blocks, and what each tile drops of those before its diagonal."""
    rows, widths, room = index.rows, _widths(index), index.workspace.empty
    mean, ratio = widths["MEAN"], widths["BLOCK_N"] // widths["MEAN"]
    shape = (cache.num_kv_heads, rows.key_starts[-1] // mean, cache.head_dim)
    dtype = wide_dtype(cache.keys.dtype)
    means = Means(
        room(*shape, dtype=dtype),
        room(*shape, dtype=dtype),
        room(index.num_heads, index.block_ids.shape[1] * ratio, dtype=torch.uint8),
        room(index.num_heads, rows.num_tiles, dtype=torch.int32),
    )
    group = index.num_heads // cache.num_kv_heads
    longest = max(rows.seq_lens) // mean
    if longest:
        _means_kernel[(longest, rows.num_rows, cache.num_kv_heads)](
            key_args(cache, rows.block_table), cache.values, rows.row_table, mean_heads, means.keys, means.values,
            shape[1], cache.value_scale, HEAD_DIM=cache.head_dim, BLOCK_D=triton.next_power_of_2(cache.head_dim),
            GROUP=group, HEADS=triton.next_power_of_2(group), MEAN=mean, ROW_FIELDS=ROW_FIELDS,
        )  # fmt: skip
    _count_dropped_kernel[(rows.num_tiles, index.num_heads)](
        _list_args(index), mean_heads, means.dropped, means.totals, means.dropped.stride(0), **widths,
        STRIPES=index.has_stripes, CHUNK=1024,
    )  # fmt: skip
    return means


def workspace_bytes(rows: Rows, shape: LayerShape, step_tokens: int) -> int:
    """What attention with means takes from the index's workspace beside what its engine takes.

    ``step_tokens``: at least the queries of the step, of these rows and of others: each has a log-sum-exp.
    """
    mean = mean_tokens(shape.block_tokens)
    num_means = rows.key_starts[-1] // mean
    num_blocks = padded_capacity(sum(rows.block_capacities(shape.block_tokens))) * (shape.block_tokens // mean)
    means = padded_bytes(shape.num_kv_heads, num_means, shape.head_dim * shape.element_bytes, dtype=torch.uint8)
    return (
        2 * means
        + padded_bytes(shape.num_heads, num_blocks, dtype=torch.uint8)
        + padded_bytes(shape.num_heads, rows.num_tiles, dtype=torch.int32)
        + padded_bytes(shape.num_heads, max(_aligned(step_tokens), lse_columns(rows)))
    )


def lse_columns(rows: Rows) -> int:
    """Tokens of q up to the last that belongs to a row, in whole ``LSE_ALIGN``."""
    return _aligned(max(token + query_len for token, query_len in zip(rows.tokens, rows.query_lens, strict=True)))


def _aligned(num_tokens: int) -> int:
    return ceil_div(num_tokens, LSE_ALIGN) * LSE_ALIGN


def _list_args(index: SparseIndex) -> ListArgs:
    rows = index.rows
    return ListArgs(
        rows.tiles, rows.heaviest_first, rows.row_table,
        index.block_counts, index.block_ids, index.block_offsets, index.block_ids.stride(0),
        index.stripe_counts, index.stripe_positions, index.stripe_offsets,
    )  # fmt: skip


def _widths(index: SparseIndex) -> dict[str, int]:
    return {
        "BLOCK_N": index.block_tokens,
        "MEAN": mean_tokens(index.block_tokens),
        "FIELDS": TILE_FIELDS,
        "ROW_FIELDS": ROW_FIELDS,
    }


def _tiling(block_d: int, device: torch.device) -> tuple[int, int]:
    """Means that are multiplied at a time, and how many such steps of keys and values are buffered.

    64 of 128 dimensions and two buffers fit every GPU since Ampere beside a tile's queries.
    """
    chunk = 64 if block_d <= 128 else 32
    if device.type != "cuda":
        return chunk, 2
    limit_bytes = max_shared_mem(torch.cuda.current_device() if device.index is None else device.index)
    return chunk, 3 if 2 * block_d * (TILE_TOKENS + 6 * chunk) + 1024 <= limit_bytes else 2


@triton.jit(do_not_specialize=VARYING)
def _means_kernel(
    keys: KeyArgs, values, row_table, mean_heads, mean_keys, mean_values, num_means, value_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, MEAN: tl.constexpr,
    ROW_FIELDS: tl.constexpr,
):  # fmt: skip
    """The mean key and value of one block of one row and kv head; of blocks that the row has whole."""
    i_block, i_row, i_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_h = tl.arange(0, HEADS)
    b_asks = tl.load(mean_heads + i_kv * GROUP + o_h, mask=o_h < GROUP, other=0)
    num_keys = tl.load(row_table + i_row * ROW_FIELDS + 2)
    if (tl.max(b_asks.to(tl.int32), 0) != 0) & ((i_block + 1) * MEAN <= num_keys):
        o_d, o_n = tl.arange(0, BLOCK_D), i_block * MEAN + tl.arange(0, MEAN)
        table = keys.block_table + i_row.to(tl.int64) * keys.stride_table
        o_key = key_offsets(table, o_n, o_n < num_keys, keys.page_size, keys.stride_page, keys.stride_token)
        o_kv = i_kv.to(tl.int64) * keys.stride_head + o_key[:, None] + o_d[None, :]
        in_head = o_d < HEAD_DIM
        b_k = tl.load(keys.k + o_kv, mask=in_head[None, :], other=0.0).to(tl.float32)
        b_v = tl.load(values + o_kv, mask=in_head[None, :], other=0.0).to(tl.float32)
        i_mean = i_kv.to(tl.int64) * num_means + tl.load(row_table + i_row * ROW_FIELDS + 3) // MEAN + i_block
        tl.store(mean_keys + i_mean * HEAD_DIM + o_d, tl.sum(b_k, 0) / MEAN, mask=in_head)
        tl.store(mean_values + i_mean * HEAD_DIM + o_d, tl.sum(b_v, 0) / MEAN * value_scale, mask=in_head)


@triton.jit
def _num_below(sorted_list, count, b_x):
    """Of each of ``b_x``, how many of the first ``count`` of a sorted list are smaller."""
    b_begin = tl.zeros_like(b_x)
    while count > 1:
        half = count // 2
        b_begin += tl.where(tl.load(sorted_list + b_begin + half - 1) < b_x, half, 0)
        count -= half
    if count == 1:
        b_begin += (tl.load(sorted_list + b_begin) < b_x).to(tl.int32)
    return b_begin


@triton.jit(do_not_specialize=VARYING)
def _count_dropped_kernel(
    lists, mean_heads, dropped, totals, stride_dropped,
    BLOCK_N: tl.constexpr, MEAN: tl.constexpr, FIELDS: tl.constexpr, ROW_FIELDS: tl.constexpr, STRIPES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """How many keys one (tile, head) drops of each mean block before its diagonal."""
    i_tile, i_head = tl.program_id(0), tl.program_id(1)
    if tl.load(mean_heads + i_head) != 0:
        RATIO: tl.constexpr = BLOCK_N // MEAN
        i_list = i_head * tl.num_programs(0) + i_tile
        start = tl.load(lists.block_offsets + i_tile)
        blocks = lists.block_ids + i_head.to(tl.int64) * lists.stride_blocks + start
        num_blocks = tl.load(lists.block_counts + i_list)
        target = dropped + i_head.to(tl.int64) * stride_dropped + start * RATIO
        num_before = tl.load(lists.tiles + i_tile * FIELDS + 3) // BLOCK_N * RATIO
        total = 0
        for first in range(0, num_before, CHUNK):
            o_b = first + tl.arange(0, CHUNK)
            b_place = _num_below(blocks, num_blocks, o_b // RATIO)
            b_at = tl.load(blocks + b_place, mask=b_place < num_blocks, other=-1)
            b_n = MEAN + tl.zeros_like(o_b)
            if STRIPES:
                stripes = lists.stripe_positions + tl.load(lists.stripe_offsets + i_list)
                num_stripes = tl.load(lists.stripe_counts + i_list)
                b_n += _num_below(stripes, num_stripes, o_b * MEAN)
                b_n -= _num_below(stripes, num_stripes, (o_b + 1) * MEAN)
            b_n = tl.where((o_b < num_before) & (b_at != o_b // RATIO), b_n, 0)
            tl.store(target + o_b, b_n.to(tl.uint8), mask=o_b < num_before)
            total += tl.sum(b_n, 0)
        tl.store(totals + i_list, total)


@triton.jit(do_not_specialize=VARYING)
def _attend_to_means_kernel(
    queries, lists, mean_heads, mean_keys, mean_values, dropped, totals, lse, scale,
    num_means, stride_dropped, stride_lse,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, MEAN: tl.constexpr, FIELDS: tl.constexpr, ROW_FIELDS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One (head, tile). Programs run kv head by kv head, heaviest tile first, the heads of a group side by side."""
    i_program = tl.program_id(0)
    num_tiles = tl.num_programs(0) // NUM_HEADS
    i_kv = i_program // (num_tiles * GROUP)
    i_tile = tl.load(lists.order + i_program % (num_tiles * GROUP) // GROUP)
    i_head = i_kv * GROUP + i_program % GROUP
    if tl.load(mean_heads + i_head) == 0:
        return
    if tl.load(totals + i_head * num_tiles + i_tile) == 0:
        return
    i_row = tl.load(lists.tiles + i_tile * FIELDS)
    token = tl.load(lists.tiles + i_tile * FIELDS + 1)
    length = tl.load(lists.tiles + i_tile * FIELDS + 2)
    num_before = tl.load(lists.tiles + i_tile * FIELDS + 3) // BLOCK_N * (BLOCK_N // MEAN)
    o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_tile, in_dim = o_m < length, (o_d < HEAD_DIM)[None, :]
    o_q = (token + o_m).to(tl.int64)
    q_at = queries.q + o_q[:, None] * queries.stride_token + i_head * queries.stride_head + o_d[None, :]
    out_at = queries.out + o_q[:, None] * queries.stride_out_token + i_head * queries.stride_out_head + o_d[None, :]
    lse_at = lse + i_head.to(tl.int64) * stride_lse + o_q
    b_q = widen(tl.load(q_at, mask=in_tile[:, None] & in_dim, other=0.0))
    counts = dropped + i_head.to(tl.int64) * stride_dropped
    counts += tl.load(lists.block_offsets + i_tile) * (BLOCK_N // MEAN)
    start = i_kv.to(tl.int64) * num_means + tl.load(lists.row_table + i_row * ROW_FIELDS + 3) // MEAN

    b_acc = tl.load(out_at, mask=in_tile[:, None] & in_dim, other=0.0).to(tl.float32)
    b_max = tl.load(lse_at, mask=in_tile, other=0.0) * LOG2_E
    b_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    for first in range(0, num_before, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        in_chunk = o_n < num_before
        o_kv = (start + o_n)[:, None] * HEAD_DIM + o_d[None, :]
        b_k = tl.load(mean_keys + o_kv, mask=in_chunk[:, None] & in_dim, other=0.0)
        b_v = tl.load(mean_values + o_kv, mask=in_chunk[:, None] & in_dim, other=0.0)
        b_n = tl.load(counts + o_n, mask=in_chunk, other=0).to(tl.float32)
        b_bias = tl.where(b_n > 0, tl.log2(tl.maximum(b_n, 1.0)), float("-inf"))
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale + b_bias[None, :]
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
        b_decay = tl.exp2(b_max - b_new_max)
        b_p = tl.exp2(b_s - b_new_max[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
        b_max = b_new_max
    b_out = (b_acc / b_sum[:, None]).to(queries.out.dtype.element_ty)
    tl.store(out_at, b_out, mask=in_tile[:, None] & in_dim)
    tl.store(lse_at, (b_max + tl.log2(b_sum)) * LN_2, mask=in_tile)
