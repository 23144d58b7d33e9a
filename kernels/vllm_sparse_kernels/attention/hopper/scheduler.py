# SPDX-License-Identifier: Apache-2.0
"""The scheduler of ``hopper_kernel``: one warp that takes items from a counter and looks up where their keys are."""

from vllm_sparse_kernels.attention.hopper.item import AHEAD, Item, store_item
from vllm_sparse_kernels.gluon_compat import barrier, gl, gluon, mbarrier, new_counter, tile_of


@gluon.jit
def schedule(index, work, num_tiles, channels, config):
    """Pass items to the producers and consumers, and the places of their keys to the producers, until none is left.

    Each lookup depends on the previous one. While the scheduler waits, the other warps process steps whose places they
    already have.
    """
    queries = channels.queries()
    item_counter, step = new_counter(config.SLOTS), new_counter(AHEAD)
    # Each program begins with the item of its own number, and takes the others from the counter.
    rank = gl.program_id(0)
    while rank < num_tiles * config.NUM_HEADS:
        entry = gl.load(work.order + rank)
        i_head, i_tile = entry % config.NUM_HEADS, entry // config.NUM_HEADS
        o_count = i_head * num_tiles + i_tile
        tile = tile_of(index.tiles, i_tile)
        token, length, position = tile.token(), tile.length(), tile.position()
        num_blocks, num_stripes = gl.load(index.block_counts + o_count), gl.load(index.stripe_counts + o_count)
        seq_len = gl.load(index.seq_lens + tile.row())
        tail = seq_len - (position + length - 1) // config.BLOCK_N * config.BLOCK_N
        o_blocks = i_head.to(gl.int64) * index.stride_blocks + gl.load(index.block_offsets + i_tile)
        queries.acquire_empty(item_counter)
        _pass_item(channels, item_counter, Item(i_head, token, length, position, num_blocks, num_stripes, tail))
        step = _pass_blocks(channels, work.places + o_blocks * (config.BLOCK_N // config.BOX), num_blocks, step, config)
        if config.STRIPES:
            stripe_places = work.stripe_places + gl.load(index.stripe_offsets + o_count)
            step = _pass_stripes(channels, stripe_places, num_stripes, step, config)
        item_counter = item_counter.plus(1)
        rank = gl.atomic_add(work.counter, 1, sem="relaxed") + gl.num_programs(0)
    # An item with a negative head ends the other warps.
    queries.acquire_empty(item_counter)
    zero = gl.to_tensor(0)
    _pass_item(channels, item_counter, Item(zero - 1, zero, zero, zero, zero, zero, zero))


@gluon.jit
def _pass_item(channels, item_counter, item):
    store_item(channels.item_words, item_counter.slot(), item)
    mbarrier.arrive(channels.barriers.item_full.index(item_counter.slot()), count=1)


@gluon.jit
def _pass_blocks(channels, places, num_blocks, step, config):
    """Pass on the rows of the boxes of all blocks, step by step. Past the list's end, the last box is repeated."""
    BOXES: gl.constexpr = config.BLOCK_N // config.BOX
    begin = num_blocks - config.first_blocks(num_blocks)
    for i in range(config.block_steps(num_blocks)):
        step = _pass_places(channels, places, (begin - i * config.BLOCKS) * BOXES, num_blocks * BOXES, step, config)
    return step


@gluon.jit
def _pass_stripes(channels, places, num_stripes, step, config):
    """Pass on the tokens of all stripes, step by step. The last stripe is repeated."""
    for i in range(config.stripe_steps(num_stripes)):
        step = _pass_places(channels, places, i * config.STEP, num_stripes, step, config)
    return step


@gluon.jit
def _pass_places(channels, places, begin, end, step, config):
    """Pass on the places of a step."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    b_place = gl.load(places + gl.minimum(begin + gl.arange(0, config.PLACES, layout), end - 1))
    channel = channels.places()
    channel.acquire_empty(step)
    channel.buffer(step).store(b_place)
    barrier()
    channel.mark_full(step)
    return step.plus(1)
