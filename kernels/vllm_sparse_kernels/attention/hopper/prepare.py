# SPDX-License-Identifier: Apache-2.0
"""The first launch of ``hopper``: locates boxes of blocks and stripes in the cache, and orders the work."""

import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.rows import TILE_FIELDS

RANKED, OTHERS = Constant(8), Constant(1024)
"""Items that a program ranks, and other items with which it compares them at a time."""

CHUNK = Constant(512)
"""Boxes or stripes of a step."""

MOST_HEADS = Constant(1 << 16)
"""Upper bound of the number of kv heads of a rank."""


@triton.jit(do_not_specialize=["num_tiles"])
def prepare_kernel(
    index, cache, num_tiles, rows_per_page, rows_per_head, work,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BOX: tl.constexpr,
):  # fmt: skip
    """Order the work, and locate the listed blocks and stripes in the cache viewed as a matrix of tokens.

    Grid: one program for every RANKED items, which ranks them, followed by one for each item, which locates its lists.
    Bound by latency: a few dependent loads.

    Args:
        work: ``WorkArgs``; written. The counter becomes 0.
    """
    num_rankers = tl.cdiv(num_tiles * NUM_HEADS, RANKED)
    i_item = tl.program_id(0) - num_rankers
    if i_item < 0:
        begin = tl.program_id(0) * RANKED
        _rank_items(index, begin, num_tiles, work.order, NUM_HEADS, GROUP, BLOCK_N)
        if begin == 0:
            tl.store(work.counter, 0)
        return
    i_head, i_tile = _item_in_order(i_item, index, num_tiles, GROUP)
    o_count = i_head * num_tiles + i_tile
    i_row = tl.load(index.tiles + i_tile * TILE_FIELDS)
    table = cache.block_table + i_row.to(tl.int64) * cache.stride_table
    o_blocks = i_head.to(tl.int64) * index.stride_blocks + tl.load(index.block_offsets + i_tile)
    BOXES: tl.constexpr = BLOCK_N // BOX
    num_boxes = tl.load(index.block_counts + o_count) * BOXES
    head_row = i_head // GROUP * rows_per_head
    last = tl.load(index.seq_lens + i_row) - 1  # boxes after it may have no page; their keys are masked
    for start in range(0, num_boxes, CHUNK):
        o_n = start + tl.arange(0, CHUNK)
        b_block = tl.load(index.block_ids + o_blocks + o_n // BOXES, mask=o_n < num_boxes, other=0)
        b_position = tl.minimum(b_block * BLOCK_N + o_n % BOXES * BOX, last // BOX * BOX)
        target = work.places + o_blocks * BOXES + o_n
        _store_places(target, b_position, o_n < num_boxes, table, cache.page_size, rows_per_page, head_row)
    if work.stripe_places is not None:
        o_stripes = tl.load(index.stripe_offsets + o_count)
        num_stripes = tl.load(index.stripe_counts + o_count)
        # The tiles of a group share a list. The first tile locates it.
        is_first = i_tile == 0
        if i_tile > 0:
            is_other_list = tl.load(index.stripe_offsets + o_count - 1) != o_stripes
            is_first = is_other_list | (tl.load(index.stripe_counts + o_count - 1) != num_stripes)
        for start in range(0, tl.where(is_first, num_stripes, 0), CHUNK):
            o_n = start + tl.arange(0, CHUNK)
            b_position = tl.load(index.stripe_positions + o_stripes + o_n, mask=o_n < num_stripes, other=0)
            target = work.stripe_places + o_stripes + o_n
            _store_places(target, b_position, o_n < num_stripes, table, cache.page_size, rows_per_page, 0)


@triton.jit
def _rank_items(index, begin, num_tiles, order, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rank RANKED items: store each at its place in ``order``.

    Items are ordered by kv head, so that the keys of a kv head stay in the L2 cache while their readers run, and within
    a kv head by descending number of keys. All items of a kv head walk backwards from the diagonal. Items that run at
    the same time are about equally long, so programs start their next items together and read the same keys at about
    the same time. In any other order, programs drift apart, until each block is read from memory once per reader. Items
    with more than twice the mean number of keys come first, in descending powers of two, so that no long item remains
    for the end.
    """
    num_items = num_tiles * NUM_HEADS
    b_total = tl.zeros([OTHERS], tl.float32)
    for start in range(0, num_items, OTHERS):
        o_item = start + tl.arange(0, OTHERS)
        b_total += _item_cost(index, o_item, o_item < num_items, BLOCK_N)
    scale = num_items / tl.sum(b_total, 0)
    o_ranked = begin + tl.arange(0, RANKED)
    in_items = o_ranked < num_items
    b_head, b_tile = _item_in_order(tl.where(in_items, o_ranked, 0), index, num_tiles, GROUP)
    b_cost = _item_cost(index, b_head * num_tiles + b_tile, in_items, BLOCK_N)
    b_key = _sort_key(b_cost, b_head // GROUP, scale)
    b_rank = tl.zeros([RANKED], tl.int32)
    for start in range(0, num_items, OTHERS):
        o_item = start + tl.arange(0, OTHERS)
        valid = o_item < num_items
        b_other_head, b_other_tile = _item_in_order(tl.where(valid, o_item, 0), index, num_tiles, GROUP)
        b_other_cost = _item_cost(index, b_other_head * num_tiles + b_other_tile, valid, BLOCK_N)
        b_other_key = _sort_key(b_other_cost, b_other_head // GROUP, scale)
        b_other_key = tl.where(valid, b_other_key, -MOST_HEADS - 1)[None, :]
        b_other_cost = b_other_cost[None, :]
        b_longer = (b_other_cost > b_cost[:, None]) | (
            (b_other_cost == b_cost[:, None]) & (o_item[None, :] < o_ranked[:, None])
        )
        b_before = (b_other_key > b_key[:, None]) | ((b_other_key == b_key[:, None]) & b_longer)
        b_rank += tl.sum(b_before.to(tl.int32), 1)
    tl.store(order + b_rank, b_tile * NUM_HEADS + b_head, mask=in_items)


@triton.jit
def _item_in_order(i_item, index, num_tiles, GROUP: tl.constexpr):
    """Return (head, tile) of the i-th item, by kv head, longest tile, and head of the group.

    Items of equal length keep this order.
    """
    i_kv = i_item // (num_tiles * GROUP)
    i_tile = tl.load(index.order + i_item % (num_tiles * GROUP) // GROUP)
    return i_kv * GROUP + i_item % GROUP, i_tile


@triton.jit
def _item_cost(index, o_count, valid, BLOCK_N: tl.constexpr):
    """Return the cost of items in keys. A stripe counts as 1.5 keys."""
    b_block_keys = tl.load(index.block_counts + o_count, mask=valid, other=0).to(tl.float32) * BLOCK_N
    return b_block_keys + tl.load(index.stripe_counts + o_count, mask=valid, other=0).to(tl.float32) * 1.5


@triton.jit
def _sort_key(b_cost, b_kv_head, scale):
    """Return a sort key that is larger for items that come earlier.

    The first criterion is the power of two by which an item exceeds the mean (0 up to twice the mean). The second is
    the lower kv head.
    """
    b_excess = tl.floor(tl.log2(tl.maximum(b_cost * scale, 1.0))).to(tl.int32)
    return b_excess * MOST_HEADS - b_kv_head


@triton.jit
def _store_places(target, b_position, mask, table, page_size, rows_per_page, head_row):
    """Store the rows of some positions of one row of the batch in the cache viewed as a matrix of tokens."""
    page = tl.load(table + b_position // page_size, mask=mask, other=0)
    tl.store(target, page * rows_per_page + b_position % page_size + head_row, mask=mask)
