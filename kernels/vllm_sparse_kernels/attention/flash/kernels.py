# SPDX-License-Identifier: Apache-2.0
"""The kernels that surround FlashAttention's calls (``flash/engine.py``).

A program handles a slice of a sequence's queries, ``SLICE_TOKENS`` of the tile's 128.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.paged import load_queries_at, store_outputs
from vllm_sparse_kernels.selection.lists import list_of, load_tile
from vllm_sparse_kernels.vectors import load_padded, padded_mask

SLICE_TOKENS = Constant(32)
"""Queries of a program."""

CHUNK = Constant(512)
"""Units of a step."""

UNSPECIALIZED = ("first", "first_token", "num_tiles", "num_tokens")
TABLES = ("block_table", "stride_block_table", "stride_table", "stride_stripe_table")
"""Arguments whose value or alignment changes from step to step. Triton must not compile new variants for them.
"""


class SliceShape(NamedTuple):
    """Compile-time sizes of both kernels; every field is a ``tl.constexpr``."""

    HEAD_DIM: Any
    BLOCK_D: Any  # HEAD_DIM rounded up to a power of two
    GROUP: Any  # query heads of a kv head
    BLOCK_TOKENS: Any  # keys of a block of the index
    UNIT: Any  # keys of a unit


class Slice(NamedTuple):
    """The queries of one program."""

    i_head: Any
    i_kv: Any
    i_tile: Any
    i_row: Any
    o_q: Any  # [SLICE_TOKENS] int64, tokens in q
    o_s: Any  # [SLICE_TOKENS] int64, places among the part's queries
    in_tile: Any  # [SLICE_TOKENS], whether the tile has the query
    start: Any  # place of the sequence's first query among the part's queries
    length: Any  # queries of the sequence
    last: Any  # position of its last query


@triton.jit
def _locate(lists, starts, first, first_token, num_tiles, num_tokens, SHAPE):
    """Return the ``Slice`` of this program."""
    i_sequence = first + tl.program_id(0)
    i_kv = i_sequence // (num_tiles * SHAPE.GROUP)
    i_rank = i_sequence % (num_tiles * SHAPE.GROUP) // SHAPE.GROUP
    i_member = i_sequence % SHAPE.GROUP  # query head of the group
    i_tile = tl.load(lists.order + i_rank)
    i_row, token, length, position = load_tile(lists.tiles, i_tile)
    last = position + length - 1
    start = (i_kv * num_tokens + tl.load(starts + i_rank)) * SHAPE.GROUP + i_member * length - first_token
    o_m = tl.program_id(1) * SLICE_TOKENS + tl.arange(0, SLICE_TOKENS)
    o_q = (token + o_m).to(tl.int64)
    o_s = (start + o_m).to(tl.int64)
    i_head = i_kv * SHAPE.GROUP + i_member
    return Slice(i_head, i_kv, i_tile, i_row, o_q, o_s, o_m < length, start, length, last)


@triton.jit(do_not_specialize=UNSPECIALIZED + TABLES)
def prepare_kernel(
    queries, lists, starts, strides, sequences, first, first_token, num_tiles, num_tokens,
    block_table, stride_block_table, stride_table, stride_stripe_table, SHAPE,
):  # fmt: skip
    """Copy a slice of a sequence's queries, and list a share of its units and stripes.

    Grid: (sequences of the part, 128 / SLICE_TOKENS). Bound by memory bandwidth: each query is read and written once,
    and 4 bytes are written for each unit and stripe.

    Args:
        queries: ``AttendArgs``; reads q [tokens, query heads, HEAD_DIM].
        starts: [num_tiles] int32, number of queries before each tile, in the order of ``lists.order``.
        strides: ``GranuleStrides``.
        block_table: [num_rows, max_pages] int32.
        stride_block_table: Elements between two rows of ``block_table``.
        stride_table: Elements between two rows of ``sequences.table``.
        stride_stripe_table: Elements between two rows of ``sequences.stripe_table``.
    """
    work = _locate(lists, starts, first, first_token, num_tiles, num_tokens, SHAPE)
    i_sequence = tl.program_id(0)  # in the part
    o_d = tl.arange(0, SHAPE.BLOCK_D)
    in_head = padded_mask(work.in_tile, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)
    b_q = load_queries_at(queries, work.i_head, work.o_q, work.in_tile, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)
    tl.store(sequences.q + work.o_s[:, None] * SHAPE.HEAD_DIM + o_d[None, :], b_q, mask=in_head)
    tl.store(sequences.ends + i_sequence, work.start)
    if i_sequence == tl.num_programs(0) - 1:
        tl.store(sequences.ends + i_sequence + 1, work.start + work.length)

    i_list = work.i_head * num_tiles + work.i_tile
    pages = block_table + work.i_row.to(tl.int64) * stride_block_table
    ids = list_of(lists, work.i_head.to(tl.int64), work.i_tile)
    # All blocks are complete except the last, which ends with the tile's last query.
    num_keys = (tl.load(lists.block_counts + i_list) - 1) * SHAPE.BLOCK_TOKENS + work.last % SHAPE.BLOCK_TOKENS + 1
    tl.store(sequences.keys + i_sequence, num_keys)
    table = sequences.table + i_sequence.to(tl.int64) * stride_table
    _write_units(table, ids, num_keys, strides, pages, work.i_kv, SHAPE.BLOCK_TOKENS, SHAPE.UNIT)

    if sequences.stripe_table is not None:
        stripes = lists.stripe_positions + tl.load(lists.stripe_offsets + i_list)
        num_stripes = tl.load(lists.stripe_counts + i_list)
        tl.store(sequences.stripe_keys + i_sequence, num_stripes)
        stripe_table = sequences.stripe_table + i_sequence.to(tl.int64) * stride_stripe_table
        _write_units(stripe_table, stripes, num_stripes, strides, pages, work.i_kv, 1, 1)


@triton.jit
def _write_units(table, ids, num_keys, strides, pages, i_kv, BLOCK_TOKENS: tl.constexpr, UNIT: tl.constexpr):
    """Write a share of the table of a kv head's keys in the blocks ``ids``: numbers of units of UNIT keys.

    Stripes are blocks and units of one key.
    """
    num_units = tl.cdiv(num_keys, UNIT)
    for i in range(tl.program_id(1) * CHUNK, num_units, tl.num_programs(1) * CHUNK):
        o_n = i + tl.arange(0, CHUNK)
        listed = o_n < num_units
        b_block = tl.load(ids + o_n * UNIT // BLOCK_TOKENS, mask=listed, other=0)
        b_position = b_block * BLOCK_TOKENS + o_n * UNIT % BLOCK_TOKENS
        b_page = tl.load(pages + b_position // strides.page_size, mask=listed, other=0)
        b_in_page = b_position % strides.page_size
        b_unit = b_page * strides.page_granules + b_in_page * strides.token_granules + i_kv * strides.head_granules
        tl.store(table + o_n, b_unit, mask=listed)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def finish_kernel(
    queries, lists, starts, block_out, block_lse, stripe_out, stripe_lse, value_scale,
    first, first_token, num_tiles, num_tokens, SHAPE,
):  # fmt: skip
    """Merge a slice of a sequence's results over blocks and over stripes, and write it to the output.

    A sink scales the result by exp(lse) / (exp(lse) + exp(sink)). Grid: as ``prepare_kernel``. Bound by memory
    bandwidth: each call's output is read once, and the result is written once.

    Args:
        queries: ``AttendArgs``; out [tokens, query heads, HEAD_DIM] is written.
        starts: [num_tiles] int32, number of queries before each tile, in the order of ``lists.order``.
        block_out: [queries of the part, 1, HEAD_DIM], FlashAttention's output over blocks.
        block_lse: [1, queries of the part] float32, its log-sum-exp.
    """
    work = _locate(lists, starts, first, first_token, num_tiles, num_tokens, SHAPE)
    b_out = load_padded(block_out, work.o_s, work.in_tile, SHAPE.HEAD_DIM, SHAPE.BLOCK_D).to(tl.float32)
    b_lse = tl.load(block_lse + work.o_s, mask=work.in_tile, other=0.0)
    if stripe_out is not None:
        # Every tile has blocks, so the log-sum-exp of its blocks is finite.
        b_other_lse = tl.load(stripe_lse + work.o_s, mask=work.in_tile, other=float("-inf"))
        b_other = load_padded(stripe_out, work.o_s, work.in_tile, SHAPE.HEAD_DIM, SHAPE.BLOCK_D).to(tl.float32)
        b_max = tl.maximum(b_lse, b_other_lse)
        b_weight, b_other_weight = tl.exp(b_lse - b_max), tl.exp(b_other_lse - b_max)
        b_sum = b_weight + b_other_weight
        b_other = tl.where(b_other_weight[:, None] > 0, b_other * (b_other_weight / b_sum)[:, None], 0.0)
        b_out = b_out * (b_weight / b_sum)[:, None] + b_other
        b_lse = b_max + tl.log(b_sum)
    if queries.sinks is not None:
        b_key_share = tl.sigmoid(b_lse - tl.load(queries.sinks + work.i_head).to(tl.float32))
        b_out *= b_key_share[:, None]
    b_out *= value_scale
    store_outputs(queries, work.i_head, work.o_q, work.in_tile, b_out, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)
