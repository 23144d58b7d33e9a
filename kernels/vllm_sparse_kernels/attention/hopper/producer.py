# SPDX-License-Identifier: Apache-2.0
"""The producer of ``hopper_kernel``: takes items from a counter and copies their data to shared memory."""

from vllm_sparse_kernels.attention.hopper.item import ATOM_ROWS, COLUMNS, HALF, Channels, Config, Item
from vllm_sparse_kernels.gluon_compat import (
    aggregate,
    async_copy,
    barrier,
    bulk_descriptor,
    bulk_load,
    fence_async_shared,
    gather_load,
    gl,
    gluon,
    mbarrier,
    new_counter,
    reinterpret,
    tile_of,
)


@aggregate
class BlockList:
    """The listed blocks of an item, and the rows of their boxes in the cache viewed as a matrix."""

    places: gl.tensor  # [num_blocks, boxes of a block] int32 by pointer: rows at which boxes begin
    num_blocks: gl.tensor
    column: gl.tensor  # of the item's kv head

    @gluon.jit
    def rows(self, begin, config):
        """Return the first rows of the boxes of a step, which begins at a block of the list.

        Places outside the list give the row of its first or last box.
        """
        BOXES: gl.constexpr = config.BLOCK_N // config.BOX
        rows = ()
        for i in gl.static_range(config.STEP // config.BOX):
            i_box = gl.minimum(gl.maximum(begin * BOXES + i, 0), self.num_blocks * BOXES - 1)
            rows = rows + (gl.load(self.places + i_box),)  # type: ignore[assignment] # noqa: RUF005
        return rows


@aggregate
class StripeList:
    """The listed stripes of an item, and the keys and values of its kv head."""

    places: gl.tensor  # [num_stripes] int32 by pointer: tokens of the cache
    num_stripes: gl.tensor
    keys: gl.tensor  # by pointer, at the item's kv head
    values: gl.tensor
    stride_token: gl.tensor | gl.constexpr


@aggregate
class Loader:
    """Fills the channels of keys and values."""

    config: Config
    channels: Channels  # keys and values as pieces [ATOM_ROWS, COLUMNS], one part of a step after another
    key_boxes: bulk_descriptor
    value_boxes: bulk_descriptor

    @gluon.jit
    def load_blocks(self, blocks, step, tail, tail_parity):
        """Load all blocks of an item. Rows are looked up one step ahead."""
        BLOCKS: gl.constexpr = self.config.BLOCKS
        first_blocks = self.config.first_blocks(blocks.num_blocks)
        begin = blocks.num_blocks - first_blocks
        num_steps = 1 + begin // BLOCKS
        rows, next_rows = blocks.rows(begin, self.config), blocks.rows(begin - BLOCKS, self.config)
        # The cache may hold NaN past the row's end, and 0 · NaN is NaN.
        if tail >= self.config.BLOCK_N:
            self._load_step(blocks.column, rows, step)
        else:
            self._load_step_with_tail(blocks.column, rows, step, first_blocks, tail, tail_parity)
        for i in range(1, num_steps):
            rows = next_rows
            next_rows = blocks.rows(begin - (i + 1) * BLOCKS, self.config)
            self._load_step(blocks.column, rows, step.plus(i))
        return step.plus(num_steps)

    @gluon.jit
    def _load_step(self, column, rows, step):
        """Load the keys and values of a step. Parities are computed before the slot is free."""
        keys, values = self.channels.keys(), self.channels.values()
        slot, empty_parity = step.slot(), step.parity() ^ 1
        _acquire_for_bulk_copies(keys.empty.index(slot), empty_parity)
        self._load_boxes(self.key_boxes, column, rows, keys.full.index(slot), keys.buffers, slot)
        _acquire_for_bulk_copies(values.empty.index(slot), empty_parity)
        self._load_boxes(self.value_boxes, column, rows, values.full.index(slot), values.buffers, slot)

    @gluon.jit
    def _load_step_with_tail(self, column, rows, step, first_blocks, tail, tail_parity):
        """Load step 0, and zero its values past the row's end before the consumers see them."""
        keys, values = self.channels.keys(), self.channels.values()
        slot, empty_parity = step.slot(), step.parity() ^ 1
        _acquire_for_bulk_copies(keys.empty.index(slot), empty_parity)
        self._load_boxes(self.key_boxes, column, rows, keys.full.index(slot), keys.buffers, slot)
        _acquire_for_bulk_copies(values.empty.index(slot), empty_parity)
        arrived = self.channels.barriers.tail_arrived.index(0)
        self._load_boxes(self.value_boxes, column, rows, arrived, values.buffers, slot)
        mbarrier.wait(arrived, tail_parity)
        self._zero_values(slot, (first_blocks - 1) * self.config.BLOCK_N + tail)
        values.mark_full(step)

    @gluon.jit
    def _load_boxes(self, desc, column, rows, full, pieces, slot):
        """Begin bulk copies of a step's blocks, as boxes of [BOX, COLUMNS].

        ``full`` completes when all have arrived. A part of a step is [STEP, COLUMNS]. The boxes of the step fill it
        one after another.
        """
        BOX: gl.constexpr = self.config.BOX
        PARTS: gl.constexpr = self.config.PARTS
        BOXES: gl.constexpr = self.config.STEP // BOX
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, COLUMNS], pieces.dtype)
        num_boxes: gl.constexpr = pieces.shape[0] * ATOM_ROWS // BOX
        boxes = reinterpret(pieces, pieces.dtype, [num_boxes, BOX, COLUMNS], layout)
        mbarrier.expect(full, self.config.STEP * self.config.D * 2)
        for i_box in gl.static_range(BOXES):
            for i_part in gl.static_range(PARTS):
                target = boxes.index((slot * PARTS + i_part) * BOXES + i_box)
                bulk_load(desc, [rows[i_box], column + i_part * COLUMNS], full, target)

    @gluon.jit
    def _zero_values(self, slot, num_valid):
        """Zero a step's values starting at number ``num_valid``, and make the step visible to the matrix units."""
        PARTS: gl.constexpr = self.config.PARTS
        PIECES: gl.constexpr = self.config.PIECES
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        o_n = gl.arange(0, ATOM_ROWS, gl.SliceLayout(1, layout))
        for i in range(num_valid // ATOM_ROWS, PIECES):
            for i_part in gl.static_range(PARTS):
                piece = self.channels.v_buffers.index((slot * PARTS + i_part) * PIECES + i)
                b_v = piece.load(layout)
                valid = (i * ATOM_ROWS + o_n < num_valid)[:, None]
                piece.store(gl.where(valid, b_v, gl.zeros_like(b_v)))
        fence_async_shared()
        barrier()

    @gluon.jit
    def gather_stripes(self, stripes, step):
        """Load all stripes of an item, STEP at a time.

        Rows are looked up one step ahead, before the slot is free. The last step repeats the last stripe.
        """
        STEP: gl.constexpr = self.config.STEP
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        o_n = gl.arange(0, STEP, gl.SliceLayout(1, layout))
        keys, values = self.channels.keys(), self.channels.values()
        num_stripes = stripes.num_stripes
        num_steps = (num_stripes + STEP - 1) // STEP
        b_row = gl.load(
            stripes.places + gl.minimum(o_n, gl.maximum(num_stripes - 1, 0)), mask=o_n < num_steps * STEP, other=0
        )
        for i in range(num_steps):
            slot, empty_parity = step.slot(), step.parity() ^ 1
            mbarrier.wait(keys.empty.index(slot), empty_parity)
            self._gather(stripes.keys, b_row, stripes.stride_token, keys.buffers, slot)
            _arrive_gathered(keys.full.index(slot))
            b_next = gl.load(stripes.places + gl.minimum((i + 1) * STEP + o_n, num_stripes - 1))
            mbarrier.wait(values.empty.index(slot), empty_parity)
            self._gather(stripes.values, b_row, stripes.stride_token, values.buffers, slot)
            _arrive_gathered(values.full.index(slot))
            b_row = b_next
            step = step.plus(1)
        return step

    @gluon.jit
    def _gather(self, source, b_row, stride_token, pieces, slot):
        """Begin to copy rows of the cache, as parts of a step."""
        STEP: gl.constexpr = self.config.STEP
        PARTS: gl.constexpr = self.config.PARTS
        shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, COLUMNS], pieces.dtype)
        num_parts: gl.constexpr = pieces.shape[0] * ATOM_ROWS // STEP
        parts = reinterpret(pieces, pieces.dtype, [num_parts, STEP, COLUMNS], shared)
        o_d = gl.arange(0, COLUMNS, gl.SliceLayout(0, b_row.type.layout.parent))
        o_row = (b_row.to(gl.int64) * stride_token)[:, None] + o_d[None, :]
        for i_part in gl.static_range(PARTS):
            gather_load(parts.index(slot * PARTS + i_part), source + i_part * COLUMNS + o_row)


@gluon.jit
def produce(q_desc, k_desc, v_desc, cache, head_strides, index, work, num_tiles, channels, config):
    """Take items from the counter and load their queries, keys and values, until none is left.

    Looking up an item takes three dependent loads: its rank from the counter, its head and tile from the order, and its
    sizes from the index. Each load is issued one item ahead, so that no item waits for it.
    """
    loader = Loader(config, channels, k_desc, v_desc)
    queries = channels.queries()
    item_counter, step, num_tails = new_counter(config.SLOTS), new_counter(config.STAGES), gl.to_tensor(0)
    # Ranks of the item to load and of the next one. Each program begins with the item of its own number, and takes the
    # others from the counter.
    rank = gl.program_id(0)
    next_rank = gl.atomic_add(work.counter, 1, sem="relaxed") + gl.num_programs(0)
    item = _load_item(index, work.order, rank, num_tiles, config)
    while rank < num_tiles * config.NUM_HEADS:
        # From here on, ``item`` is the item to load, and ``rank`` belongs to the next one.
        rank = next_rank
        next_rank = gl.atomic_add(work.counter, 1, sem="relaxed") + gl.num_programs(0)
        queries.acquire_empty(item_counter)
        channels.items.write(item_counter.slot(), item)
        _load_queries(q_desc, queries, item_counter, item, head_strides, config)
        i_kv = item.i_head // config.GROUP
        tail_parity = num_tails & 1
        o_blocks = item.i_head.to(gl.int64) * index.stride_blocks + gl.load(index.block_offsets + item.i_tile)
        block_places = work.places + o_blocks * (config.BLOCK_N // config.BOX)
        blocks = BlockList(block_places, item.num_blocks, i_kv * head_strides.columns_per_head)
        seq_len = gl.load(index.seq_lens + tile_of(index.tiles, item.i_tile).row())
        tail = seq_len - (item.position + item.length - 1) // config.BLOCK_N * config.BLOCK_N
        step = loader.load_blocks(blocks, step, tail, tail_parity)
        num_tails += (tail < config.BLOCK_N).to(gl.int32)
        if config.STRIPES:
            stripe_places = work.stripe_places + gl.load(index.stripe_offsets + item.i_head * num_tiles + item.i_tile)
            o_head = i_kv.to(gl.int64) * cache.stride_head
            stripes = StripeList(
                stripe_places, item.num_stripes, cache.k + o_head, cache.v + o_head, cache.stride_token
            )
            step = loader.gather_stripes(stripes, step)
        item_counter = item_counter.plus(1)
        item = _load_item(index, work.order, rank, num_tiles, config)
    # An item with a negative head ends the consumers.
    queries.acquire_empty(item_counter)
    zero = gl.to_tensor(0)
    channels.items.write(item_counter.slot(), Item(zero - 1, zero, zero, zero, zero, zero, zero))
    queries.mark_full(item_counter)


@gluon.jit
def _load_item(index, order, rank, num_tiles, config):
    """Return the item at a place in the order. Past the last place, it is any item."""
    entry = gl.load(order + rank, mask=rank < num_tiles * config.NUM_HEADS, other=0)
    i_head, i_tile = entry % config.NUM_HEADS, entry // config.NUM_HEADS
    tile = tile_of(index.tiles, i_tile)
    token, length, position = tile.token(), tile.length(), tile.position()
    num_blocks = gl.load(index.block_counts + i_head * num_tiles + i_tile)
    num_stripes = gl.load(index.stripe_counts + i_head * num_tiles + i_tile)
    return Item(i_head, i_tile, token, length, position, num_blocks, num_stripes)


@gluon.jit
def _load_queries(q_desc, queries, item_counter, item, head_strides, config):
    """Begin bulk copies of a tile's queries, as parts of HALF queries and COLUMNS columns."""
    PARTS: gl.constexpr = config.PARTS
    full = queries.full_barrier(item_counter)
    column = item.i_head * head_strides.columns_per_query_head
    mbarrier.expect(full, 2 * HALF * config.D * 2)
    for i_half in gl.static_range(2):
        for i_part in gl.static_range(PARTS):
            target = queries.buffers.index((item_counter.slot() * 2 + i_half) * PARTS + i_part)
            bulk_load(q_desc, [item.token + i_half * HALF, column + i_part * COLUMNS], full, target)


@gluon.jit
def _acquire_for_bulk_copies(empty, parity):
    """Wait until a slot may be written.

    A single warp issues the copies that follow. If another warp of the group looked at this barrier only after their
    data had been consumed, it would see the next phase and wait forever. Therefore all warps pass the barrier together.
    """
    mbarrier.wait(empty, parity)
    if gl.num_warps() > 1:
        barrier()


@gluon.jit
def _arrive_gathered(full):
    """Signal a step when all threads' copies have arrived. Each thread adds itself to the count; thread 0 arrives."""
    async_copy.mbarrier_arrive(full, increment_count=True)
    barrier()
    mbarrier.arrive(full, count=1)
