# SPDX-License-Identifier: Apache-2.0
"""What stands around FlashAttention's calls: queries and tables before, the merge after. See ``flash.py``.

A program is a slice of a sequence's queries, ``ROWS`` of the tile's 128.
"""

import triton
import triton.language as tl

VARYING = ("first", "first_token", "num_tiles", "num_tokens")
TABLES = ("block_table", "stride_block_table", "stride_table", "stride_stripe_table")
"""Arguments that change from step to step, in value or in alignment: they shall not call for new variants of a kernel.
"""


@triton.jit
def _locate(
    lists, starts, first, first_token, num_tiles, num_tokens,
    GROUP: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Of this program's sequence: head, kv head, tile, row; of the program's queries: tokens in q, places among the
    part's queries, and which of them there are; of all of the sequence's: the first one's place, their number, and the
    position of the last.
    """
    i_sequence = first + tl.program_id(0)
    i_kv = i_sequence // (num_tiles * GROUP)
    i_rank = i_sequence % (num_tiles * GROUP) // GROUP
    i_group = i_sequence % GROUP
    i_tile = tl.load(lists.order + i_rank)
    i_row = tl.load(lists.tiles + i_tile * FIELDS)
    token = tl.load(lists.tiles + i_tile * FIELDS + 1)
    length = tl.load(lists.tiles + i_tile * FIELDS + 2)
    last = tl.load(lists.tiles + i_tile * FIELDS + 3) + length - 1
    start = (i_kv * num_tokens + tl.load(starts + i_rank)) * GROUP + i_group * length - first_token
    o_m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_q = (token + o_m).to(tl.int64)
    o_s = (start + o_m).to(tl.int64)
    return i_kv * GROUP + i_group, i_kv, i_tile, i_row, o_q, o_s, o_m < length, start, length, last


@triton.jit(do_not_specialize=VARYING + TABLES)
def prepare_kernel(
    queries, lists, starts, places, sequences, first, first_token, num_tiles, num_tokens,
    block_table, stride_block_table, stride_table, stride_stripe_table,
    BLOCK_TOKENS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Copy the sequence's queries, say where they end, and list its units and single keys."""
    i_head, i_kv, i_tile, i_row, o_q, o_s, in_tile, start, length, last = _locate(
        lists, starts, first, first_token, num_tiles, num_tokens, GROUP, ROWS, FIELDS
    )
    i_part, i_slice = tl.program_id(0), tl.program_id(1)
    o_d = tl.arange(0, BLOCK_D)
    in_head = in_tile[:, None] & (o_d < HEAD_DIM)[None, :]
    o_q = o_q[:, None] * queries.stride_token + i_head * queries.stride_head + o_d[None, :]
    b_q = tl.load(queries.q + o_q, mask=in_head)
    tl.store(sequences.q + o_s[:, None] * HEAD_DIM + o_d[None, :], b_q, mask=in_head)
    tl.store(sequences.ends + i_part, start)
    if i_part == tl.num_programs(0) - 1:
        tl.store(sequences.ends + i_part + 1, start + length)

    i_list = i_head * num_tiles + i_tile
    pages = block_table + i_row.to(tl.int64) * stride_block_table
    ids = lists.block_ids + i_head.to(tl.int64) * lists.stride_blocks + tl.load(lists.block_offsets + i_tile)
    # All blocks are whole but the last, which ends with the tile's last query.
    num_keys = (tl.load(lists.block_counts + i_list) - 1) * BLOCK_TOKENS + last % BLOCK_TOKENS + 1
    tl.store(sequences.keys + i_part, num_keys)
    num_units = tl.cdiv(num_keys, UNIT)
    table = sequences.table + i_part.to(tl.int64) * stride_table
    for i in range(i_slice * CHUNK, num_units, tl.num_programs(1) * CHUNK):
        o_n = i + tl.arange(0, CHUNK)
        listed = o_n < num_units
        block = tl.load(ids + o_n * UNIT // BLOCK_TOKENS, mask=listed, other=0)
        position = block * BLOCK_TOKENS + o_n * UNIT % BLOCK_TOKENS
        tl.store(table + o_n, _unit_number(places, pages, i_kv, position, listed), mask=listed)

    if sequences.stripe_table is not None:
        stripes = lists.stripe_positions + tl.load(lists.stripe_offsets + i_list)
        num_stripes = tl.load(lists.stripe_counts + i_list)
        tl.store(sequences.stripe_keys + i_part, num_stripes)
        stripe_table = sequences.stripe_table + i_part.to(tl.int64) * stride_stripe_table
        for i in range(i_slice * CHUNK, num_stripes, tl.num_programs(1) * CHUNK):
            o_n = i + tl.arange(0, CHUNK)
            listed = o_n < num_stripes
            position = tl.load(stripes + o_n, mask=listed, other=0)
            tl.store(stripe_table + o_n, _unit_number(places, pages, i_kv, position, listed), mask=listed)


@triton.jit
def _unit_number(places, pages, i_kv, position, mask):
    """Of the units that begin at these positions of a row, in one kv head's keys."""
    page = tl.load(pages + position // places.page_size, mask=mask, other=0)
    in_page = position % places.page_size
    return page * places.page_granules + in_page * places.token_granules + i_kv * places.head_granules


@triton.jit(do_not_specialize=VARYING)
def finish_kernel(
    queries, lists, starts, block_out, block_lse, stripe_out, stripe_lse, value_scale,
    first, first_token, num_tiles, num_tokens,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The sequence's result to where it belongs, that of its single keys merged with it, in values' own units.

    A sink leaves it exp(lse) / (exp(lse) + exp(sink)).
    """
    i_head, _, _, _, o_q, o_s, in_tile, _, _, _ = _locate(
        lists, starts, first, first_token, num_tiles, num_tokens, GROUP, ROWS, FIELDS
    )
    o_d = tl.arange(0, BLOCK_D)
    in_head = in_tile[:, None] & (o_d < HEAD_DIM)[None, :]
    o_sd = o_s[:, None] * HEAD_DIM + o_d[None, :]
    b_out = tl.load(block_out + o_sd, mask=in_head)
    b_lse = tl.load(block_lse + o_s, mask=in_tile, other=0.0)
    if stripe_out is not None:
        # A tile always has blocks: theirs is finite.
        b_other_lse = tl.load(stripe_lse + o_s, mask=in_tile, other=float("-inf"))
        b_other = tl.load(stripe_out + o_sd, mask=in_head).to(tl.float32)
        b_max = tl.maximum(b_lse, b_other_lse)
        b_weight, b_other_weight = tl.exp(b_lse - b_max), tl.exp(b_other_lse - b_max)
        b_sum = b_weight + b_other_weight
        b_other = tl.where(b_other_weight[:, None] > 0, b_other * (b_other_weight / b_sum)[:, None], 0.0)
        b_out = b_out.to(tl.float32) * (b_weight / b_sum)[:, None] + b_other
        b_lse = b_max + tl.log(b_sum)
    if queries.sinks is not None:
        b_left = tl.sigmoid(b_lse - tl.load(queries.sinks + i_head).to(tl.float32))
        b_out = b_out.to(tl.float32) * b_left[:, None]
    b_out = (b_out.to(tl.float32) * value_scale).to(queries.out.dtype.element_ty)
    o_out = o_q[:, None] * queries.stride_out_token + i_head * queries.stride_out_head + o_d[None, :]
    tl.store(queries.out + o_out, b_out, mask=in_head)
    if queries.lse is not None:
        tl.store(queries.lse + i_head.to(tl.int64) * queries.stride_lse_head + o_q, b_lse, mask=in_tile)
