# SPDX-License-Identifier: Apache-2.0
"""The producers of ``hopper_kernel``: a warp that copies queries and keys to shared memory, and a warp for values."""

from vllm_sparse_kernels.attention.hopper.item import AHEAD, ATOM_ROWS, COLUMNS, HALF, Config, as_scalar
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.gluon_compat import (
    Channel,
    Counter,
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
)

GATHERED = Constant(32)
"""Stripes that are gathered at a time, limited by a producer's registers."""


@aggregate
class Loader:
    """Fills the channel of keys or of values from the places that the scheduler passes on."""

    config: Config
    places: Channel
    channel: Channel  # keys or values as pieces [ATOM_ROWS, COLUMNS], one part of a step after another
    boxes: bulk_descriptor

    @gluon.jit
    def load_boxes(self, column, step, full):
        """Begin bulk copies of a step's blocks, as boxes of [BOX, COLUMNS].

        ``full`` completes when all have arrived. A part of a step is [STEP, COLUMNS]. The boxes of the step fill it
        one after another.
        """
        BOX: gl.constexpr = self.config.BOX
        BOXES: gl.constexpr = self.config.BOXES
        PARTS: gl.constexpr = self.config.PARTS
        pieces = self.channel.buffers
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, COLUMNS], pieces.dtype)
        num_boxes: gl.constexpr = pieces.shape[0] * ATOM_ROWS // BOX
        boxes = reinterpret(pieces, pieces.dtype, [num_boxes, BOX, COLUMNS], layout)
        place_counter = Counter(step.count, AHEAD)
        self.places.acquire_full(place_counter)
        rows = ()
        for i in gl.static_range(BOXES):
            row = as_scalar(self.places.buffer(place_counter).slice(i, 1))
            rows = rows + (row,)  # type: ignore[assignment] # noqa: RUF005
        barrier()
        self.places.release(place_counter)
        self.channel.acquire_empty(step)
        mbarrier.expect(full, self.config.STEP * self.config.D * 2)
        for i_box in gl.static_range(BOXES):
            for i_part in gl.static_range(PARTS):
                target = boxes.index((step.slot() * PARTS + i_part) * BOXES + i_box)
                bulk_load(self.boxes, [rows[i_box], column + i_part * COLUMNS], full, target)

    @gluon.jit
    def gather_stripes(self, source, stride_token, num_stripes, step):
        """Gather an item's stripes from ``source``, the keys or values of its kv head."""
        for _ in range(self.config.stripe_steps(num_stripes)):
            self._gather_step(source, stride_token, step)
            step = step.plus(1)
        return step

    @gluon.jit
    def _gather_step(self, source, stride_token, step):
        """Begin to copy the stripes of a step, as parts of [GATHERED, COLUMNS]."""
        GROUPS: gl.constexpr = self.config.STEP // GATHERED
        PARTS: gl.constexpr = self.config.PARTS
        pieces = self.channel.buffers
        shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GATHERED, COLUMNS], pieces.dtype)
        num_parts: gl.constexpr = pieces.shape[0] * ATOM_ROWS // GATHERED
        parts = reinterpret(pieces, pieces.dtype, [num_parts, GATHERED, COLUMNS], shared)
        words = self.places.buffers
        groups = reinterpret(words, gl.int32, [AHEAD * GROUPS, GATHERED], words.layout)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
        o_d = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        place_counter = Counter(step.count, AHEAD)
        self.places.acquire_full(place_counter)
        self.channel.acquire_empty(step)
        for i in range(GROUPS):
            b_place = groups.index(place_counter.slot() * GROUPS + i).load(gl.SliceLayout(1, layout))
            o_row = (b_place.to(gl.int64) * stride_token)[:, None] + o_d[None, :]
            for i_part in gl.static_range(PARTS):
                target = parts.index((step.slot() * PARTS + i_part) * GROUPS + i)
                gather_load(target, source + i_part * COLUMNS + o_row)
        barrier()
        self.places.release(place_counter)
        # Each thread adds itself to the count, and arrives with its last copy; one thread arrives once more.
        full = self.channel.full_barrier(step)
        async_copy.mbarrier_arrive(full, increment_count=True)
        barrier()
        mbarrier.arrive(full, count=1)

    @gluon.jit
    def zero_end(self, step, num_valid):
        """Zero a step's values starting at number ``num_valid``, and make the step visible to the matrix units."""
        PARTS: gl.constexpr = self.config.PARTS
        PIECES: gl.constexpr = self.config.PIECES
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        o_n = gl.arange(0, ATOM_ROWS, gl.SliceLayout(1, layout))
        for i in range(num_valid // ATOM_ROWS, PIECES):
            for i_part in gl.static_range(PARTS):
                piece = self.channel.buffers.index((step.slot() * PARTS + i_part) * PIECES + i)
                b_v = piece.load(layout)
                valid = (i * ATOM_ROWS + o_n < num_valid)[:, None]
                piece.store(gl.where(valid, b_v, gl.zeros_like(b_v)))
        fence_async_shared()
        barrier()


@gluon.jit
def load_keys(q_desc, k_desc, cache, head_strides, channels, config):
    """Load the queries and keys of all items."""
    queries, keys = channels.queries(), channels.keys()
    loader = Loader(config, channels.places(), keys, k_desc)
    item_counter, step = new_counter(config.SLOTS), new_counter(config.STAGES)
    item = channels.await_item(item_counter)
    while item.i_head >= 0:
        _load_queries(q_desc, queries, item_counter, item, head_strides, config)
        i_kv = item.i_head // config.GROUP
        for _ in range(config.block_steps(item.num_blocks)):
            loader.load_boxes(i_kv * head_strides.columns_per_head, step, keys.full_barrier(step))
            step = step.plus(1)
        if config.STRIPES:
            source = cache.k + i_kv.to(gl.int64) * cache.stride_head
            step = loader.gather_stripes(source, cache.stride_token, item.num_stripes, step)
        item_counter = item_counter.plus(1)
        item = channels.await_item(item_counter)
    queries.mark_full(item_counter)


@gluon.jit
def load_values(v_desc, cache, head_strides, channels, config):
    """Load the values of all items.

    The cache may hold NaN past a row's end, and 0 · NaN is NaN. A step with such values arrives at the channel's last
    barrier. This warp zeroes them, and then signals the step to the consumers.
    """
    queries, values = channels.queries(), channels.values()
    loader = Loader(config, channels.places(), values, v_desc)
    item_counter, step, num_tails = new_counter(config.SLOTS), new_counter(config.STAGES), gl.to_tensor(0)
    item = channels.await_item(item_counter)
    while item.i_head >= 0:
        # The consumers release an item before they need its last values. Without this release, the scheduler could
        # write another item before this warp has read this one.
        queries.release(item_counter)
        i_kv = item.i_head // config.GROUP
        for i in range(config.block_steps(item.num_blocks)):
            has_tail = (i == 0) & (item.tail < config.BLOCK_N)
            arrived = values.full.index(gl.where(has_tail, config.STAGES, step.slot()))
            loader.load_boxes(i_kv * head_strides.columns_per_head, step, arrived)
            if has_tail:
                mbarrier.wait(arrived, num_tails & 1)
                loader.zero_end(step, (config.first_blocks(item.num_blocks) - 1) * config.BLOCK_N + item.tail)
                values.mark_full(step)
                num_tails += 1
            step = step.plus(1)
        if config.STRIPES:
            source = cache.v + i_kv.to(gl.int64) * cache.stride_head
            step = loader.gather_stripes(source, cache.stride_token, item.num_stripes, step)
        item_counter = item_counter.plus(1)
        item = channels.await_item(item_counter)


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
