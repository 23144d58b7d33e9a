# SPDX-License-Identifier: Apache-2.0
"""The producer of ``hopper_kernel``: takes items off a counter and brings what they need into shared memory."""

from vllm_sparse_kernels.attend.hopper_item import HALF, first_step, publish
from vllm_sparse_kernels.gluon_names import (
    async_copy,
    barrier,
    bulk_load,
    fence_async_shared,
    gather_load,
    gl,
    gluon,
    mbarrier,
    reinterpret,
)

SWEEP = gl.constexpr(8)
"""Rows of a swizzled atom: the smallest piece of a step that is a tile of its own."""


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, cache, matrix, index, lists, counter, num_tiles, buffers, barriers,
    GROUP: gl.constexpr, SHAPE: gl.constexpr, STRIPES: gl.constexpr,
):  # fmt: skip
    """Takes items off the counter and loads what they need, until none is left.

    What the next item is has been looked up by the time that its turn comes: three loads, each for the next one.
    """
    NUM_HEADS: gl.constexpr = SHAPE[0]
    D: gl.constexpr = SHAPE[2]
    FIELDS: gl.constexpr = SHAPE[4]
    SLOTS: gl.constexpr = SHAPE[6]
    places, stripe_places, order = lists
    q_tiles, k_pieces, v_pieces, items = buffers
    q_full, q_empty = barriers[0], barriers[1]
    loaded = (k_pieces, v_pieces, barriers)
    i_item, i_step, num_mended = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    rank = gl.program_id(0)
    following = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
    i_head, i_tile, token, length, first, num_blocks, num_stripes = _item(
        index, order, rank, num_tiles, NUM_HEADS, FIELDS
    )
    while rank < num_tiles * NUM_HEADS:
        rank = following
        following = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
        slot = i_item % SLOTS
        mbarrier.wait(q_empty.index(slot), (i_item // SLOTS & 1) ^ 1)
        publish(items, slot, i_head, token, length, first, num_blocks, num_stripes)
        _load_queries(q_desc, q_tiles, q_full.index(slot), slot, token, i_head * matrix.columns_per_query_head, D)
        i_kv = i_head // GROUP
        item = (i_head, i_tile, i_kv, length, first, num_blocks)
        i_step, mends = _load_blocks_of(
            k_desc, v_desc, matrix, index, places, item, loaded, i_step, num_mended & 1, SHAPE
        )
        num_mended += mends.to(gl.int32)
        if STRIPES:
            listed = stripe_places + gl.load(index.stripe_offsets + i_head * num_tiles + i_tile)
            o_head = i_kv.to(gl.int64) * cache.stride_head
            sources = (cache.k + o_head, cache.v + o_head, cache.stride_token)
            i_step = _gather_steps(sources, listed, num_stripes, loaded, i_step, SHAPE)
        i_item += 1
        i_head, i_tile, token, length, first, num_blocks, num_stripes = _item(
            index, order, rank, num_tiles, NUM_HEADS, FIELDS
        )
    slot = i_item % SLOTS
    mbarrier.wait(q_empty.index(slot), (i_item // SLOTS & 1) ^ 1)
    none = gl.to_tensor(0)
    publish(items, slot, none - 1, none, none, none, none, none)
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def _item(index, order, rank, num_tiles, NUM_HEADS: gl.constexpr, FIELDS: gl.constexpr):
    """What a rank of the order stands for; past the last one, anything."""
    entry = gl.load(order + rank, mask=rank < num_tiles * NUM_HEADS, other=0)
    i_head, i_tile = entry % NUM_HEADS, entry // NUM_HEADS
    fields = index.tiles + i_tile * FIELDS
    token, length, first = gl.load(fields + 1), gl.load(fields + 2), gl.load(fields + 3)
    num_blocks = gl.load(index.block_counts + i_head * num_tiles + i_tile)
    num_stripes = gl.load(index.stripe_counts + i_head * num_tiles + i_tile)
    return i_head, i_tile, token, length, first, num_blocks, num_stripes


@gluon.jit
def _load_queries(q_desc, q_tiles, full, slot, token, column, D: gl.constexpr):
    """A tile's queries, as parts of 64 queries and 64 columns."""
    mbarrier.expect(full, 2 * HALF * D * 2)
    for half in gl.static_range(2):
        for part in gl.static_range(D // HALF):
            target = q_tiles.index((slot * 2 + half) * (D // HALF) + part)
            bulk_load(q_desc, [token + half * HALF, column + part * HALF], full, target)


@gluon.jit
def _load_blocks_of(
    k_desc, v_desc, matrix, index, places, item, loaded, i_step, parity, SHAPE: gl.constexpr
):  # fmt: skip
    """All steps over blocks of an item: the number of the step after them, and whether values had to be mended."""
    i_head, i_tile, i_kv, length, first, num_blocks = item
    BLOCK_N: gl.constexpr = SHAPE[1]
    BLOCKS: gl.constexpr = SHAPE[5] // BLOCK_N
    listed = places + i_head.to(gl.int64) * index.stride_blocks + gl.load(index.block_offsets + i_tile)
    where = (listed, num_blocks, i_kv * matrix.rows_per_head, i_kv * matrix.columns_per_head)
    # Past the row's end the cache holds anything, NaN too, and 0 · NaN would still be NaN.
    row_end = gl.load(index.row_ends + gl.load(index.tiles + i_tile * SHAPE[4]))
    tail = row_end - (first + length - 1) // BLOCK_N * BLOCK_N
    _load_first_step(k_desc, v_desc, loaded, i_step, where, tail, parity, SHAPE)
    rest = first_step(num_blocks, BLOCKS)
    num_steps = 1 + (num_blocks - rest) // BLOCKS
    for i in range(1, num_steps):
        _load_step(k_desc, v_desc, loaded, i_step + i, where, num_blocks - rest - i * BLOCKS, SHAPE)
    return i_step + num_steps, tail < BLOCK_N


@gluon.jit
def _load_first_step(k_desc, v_desc, loaded, i_step, where, tail, parity, SHAPE: gl.constexpr):
    """Step 0: the list's last blocks. What is past the row's end of its values is zeroed before the consumers see it.

    Where the blocks do not fill the step, the last one stands in for the missing ones; they are masked.
    """
    BLOCK_N: gl.constexpr = SHAPE[1]
    STAGES: gl.constexpr = SHAPE[3]
    num_blocks = where[1]
    rest = first_step(num_blocks, SHAPE[5] // BLOCK_N)
    if tail >= BLOCK_N:
        _load_step(k_desc, v_desc, loaded, i_step, where, num_blocks - rest, SHAPE)
    else:
        k_pieces, v_pieces, barriers = loaded
        k_full, k_empty, v_full, v_empty = barriers[2], barriers[3], barriers[4], barriers[5]
        mended = barriers[6]
        stage, empty = i_step % STAGES, (i_step // STAGES & 1) ^ 1
        found = _places(where, num_blocks - rest, SHAPE)
        _wait_for_room(k_empty.index(stage), empty)
        _load_blocks(k_desc, found, k_full.index(stage), k_pieces, stage, SHAPE)
        _wait_for_room(v_empty.index(stage), empty)
        _load_blocks(v_desc, found, mended.index(0), v_pieces, stage, SHAPE)
        mbarrier.wait(mended.index(0), parity)
        _clear_rows(v_pieces, stage, (rest - 1) * BLOCK_N + tail, SHAPE)
        mbarrier.arrive(v_full.index(stage), count=1)


@gluon.jit
def _load_step(k_desc, v_desc, loaded, i_step, where, begin, SHAPE: gl.constexpr):
    """Keys and values of the blocks from ``begin`` of the list on. Where they lie is looked up before there is room."""
    STAGES: gl.constexpr = SHAPE[3]
    k_pieces, v_pieces, barriers = loaded
    k_full, k_empty, v_full, v_empty = barriers[2], barriers[3], barriers[4], barriers[5]
    stage, empty = i_step % STAGES, (i_step // STAGES & 1) ^ 1
    found = _places(where, begin, SHAPE)
    _wait_for_room(k_empty.index(stage), empty)
    _load_blocks(k_desc, found, k_full.index(stage), k_pieces, stage, SHAPE)
    _wait_for_room(v_empty.index(stage), empty)
    _load_blocks(v_desc, found, v_full.index(stage), v_pieces, stage, SHAPE)


@gluon.jit
def _wait_for_room(empty, parity):
    """One warp asks for the copies that follow. Were another of the group still to look at this barrier once they have
    been used, it would find the next phase, and wait for ever: so all look before any goes on.
    """
    mbarrier.wait(empty, parity)
    if gl.num_warps() > 1:
        barrier()


@gluon.jit
def _places(where, begin, SHAPE: gl.constexpr):
    """Column and rows of a step's blocks, in the cache seen as a matrix: always four rows, however many blocks."""
    NUM: gl.constexpr = SHAPE[5] // SHAPE[1]
    listed, num_blocks, offset, column = where
    first = gl.load(listed + begin) + offset
    second, third, fourth = first, first, first
    if NUM >= 2:
        second = gl.load(listed + gl.minimum(begin + 1, num_blocks - 1)) + offset
    if NUM == 4:
        third = gl.load(listed + gl.minimum(begin + 2, num_blocks - 1)) + offset
        fourth = gl.load(listed + gl.minimum(begin + 3, num_blocks - 1)) + offset
    return column, first, second, third, fourth


@gluon.jit
def _load_blocks(desc, found, full, pieces, stage, SHAPE: gl.constexpr):
    """As 64-column parts: a part of a step is [STEP, 64], which its blocks fill one after the other."""
    BLOCK_N: gl.constexpr = SHAPE[1]
    D: gl.constexpr = SHAPE[2]
    STEP: gl.constexpr = SHAPE[5]
    column = found[0]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], pieces.dtype)
    PARTS: gl.constexpr = D // HALF
    NUM: gl.constexpr = STEP // BLOCK_N
    tiles = reinterpret(pieces, pieces.dtype, [pieces.shape[0] * SWEEP // BLOCK_N, BLOCK_N, HALF], layout)
    mbarrier.expect(full, STEP * D * 2)
    for j in gl.static_range(NUM):
        for part in gl.static_range(PARTS):
            target = tiles.index((stage * PARTS + part) * NUM + j)
            bulk_load(desc, [found[1 + j], column + part * HALF], full, target)


@gluon.jit
def _clear_rows(pieces, stage, valid, SHAPE: gl.constexpr):
    """Zero the rows from ``valid`` on of a step that has arrived, and hand it to the matrix units."""
    PARTS: gl.constexpr = SHAPE[2] // HALF
    NUM: gl.constexpr = SHAPE[5] // SWEEP
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_m = gl.arange(0, SWEEP, gl.SliceLayout(1, layout))
    for i in range(valid // SWEEP, NUM):
        for part in gl.static_range(PARTS):
            piece = pieces.index((stage * PARTS + part) * NUM + i)
            b_x = piece.load(layout)
            kept = (i * SWEEP + o_m < valid)[:, None]
            piece.store(gl.where(kept, b_x, gl.zeros_like(b_x)))
    fence_async_shared()
    barrier()


@gluon.jit
def _gather_steps(sources, listed, num_stripes, loaded, i_step, SHAPE: gl.constexpr):
    """All stripes of an item, STEP at a time; returns the number of the step after them.

    Rows are looked up a step ahead, before there is room for them.
    """
    D: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    STEP: gl.constexpr = SHAPE[5]
    k_pieces, v_pieces, barriers = loaded
    k_full, k_empty, v_full, v_empty = barriers[2], barriers[3], barriers[4], barriers[5]
    k, v, stride_token = sources
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_n = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    num_steps = (num_stripes + STEP - 1) // STEP
    b_row = gl.load(listed + gl.minimum(o_n, gl.maximum(num_stripes - 1, 0)), mask=o_n < num_steps * STEP, other=0)
    for i in range(num_steps):
        stage, empty = i_step % STAGES, (i_step // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), empty)
        _gather(k, b_row, stride_token, k_pieces, stage, D)
        _arrive_gathered(k_full.index(stage))
        b_next = gl.load(listed + gl.minimum((i + 1) * STEP + o_n, num_stripes - 1))
        mbarrier.wait(v_empty.index(stage), empty)
        _gather(v, b_row, stride_token, v_pieces, stage, D)
        _arrive_gathered(v_full.index(stage))
        b_row = b_next
        i_step += 1
    return i_step


@gluon.jit
def _gather(source, b_row, stride_token, pieces, stage, D: gl.constexpr):
    """Rows of the cache, as 64-column parts of a step."""
    PARTS: gl.constexpr = D // HALF
    STEP: gl.constexpr = b_row.shape[0]
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, HALF], pieces.dtype)
    tiles = reinterpret(pieces, pieces.dtype, [pieces.shape[0] * SWEEP // STEP, STEP, HALF], shared)
    o_d = gl.arange(0, HALF, gl.SliceLayout(0, b_row.type.layout.parent))
    o_row = (b_row.to(gl.int64) * stride_token)[:, None] + o_d[None, :]
    for part in gl.static_range(PARTS):
        gather_load(tiles.index(stage * PARTS + part), source + part * HALF + o_row)


@gluon.jit
def _arrive_gathered(full):
    """Signal a step once every thread's copies have landed: each adds itself to the count, and then one arrives."""
    async_copy.mbarrier_arrive(full, increment_count=True)
    barrier()
    mbarrier.arrive(full, count=1)
