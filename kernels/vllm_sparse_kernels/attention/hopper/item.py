# SPDX-License-Identifier: Apache-2.0
"""Types that all warps of ``hopper_kernel`` share: sizes, work items, and the channels between the warps."""

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.gluon_compat import Channel, aggregate, barrier, gl, gluon, mbarrier

HALF = Constant(64)
"""Queries of a consumer group: half of a tile."""

COLUMNS = Constant(64)
"""Columns of 16 bits in a row of 128 bytes, the span of the swizzle. Shared memory holds vectors as parts of COLUMNS
columns, one part after another."""

ATOM_ROWS = Constant(8)
"""Rows of a swizzle atom, the smallest part of a step that is a valid tile."""

SIZES = {
    64: {"STEP": 128, "STAGES": 4, "SLOTS": 2},
    128: {"STEP": 128, "STAGES": 2, "SLOTS": 2},
    256: {"STEP": 64, "STAGES": 2, "SLOTS": 1},
}
"""Sizes that fit into shared memory, by head_dim: keys of a step, buffered steps, buffered query tiles."""

AHEAD = Constant(4)
"""Steps whose places the scheduler looks up ahead."""


@aggregate
class Config:
    """Compile-time sizes of one variant of the kernel, and the layouts that follow from them."""

    NUM_HEADS: gl.constexpr
    GROUP: gl.constexpr  # query heads of a kv head
    BLOCK_N: gl.constexpr  # keys of an index block
    BOX: gl.constexpr  # keys of a bulk copy, which lie within a page
    D: gl.constexpr  # head_dim
    STRIPES: gl.constexpr  # whether items may have stripes
    STEP: gl.constexpr  # keys of a step
    STAGES: gl.constexpr  # steps of keys, and of values, in shared memory
    SLOTS: gl.constexpr  # items whose queries are in shared memory
    BLOCKS: gl.constexpr  # index blocks of a step
    BOXES: gl.constexpr  # bulk copies of a step and part
    PLACES: gl.constexpr  # room for places of a step: of boxes, or of stripes
    PARTS: gl.constexpr  # parts of COLUMNS columns in a vector
    PIECES: gl.constexpr  # pieces of ATOM_ROWS rows in a part of a step
    TURNS: gl.constexpr  # whether the consumer groups issue their products in turn
    scores_layout: gl.constexpr  # of [64, STEP] scores in a consumer group's registers
    outputs_layout: gl.constexpr  # of [64, D] sums of products with values

    @gluon.constexpr_function
    def __init__(self, NUM_HEADS, GROUP, BLOCK_N, BOX, D, STRIPES):
        sizes = SIZES[D]
        self.NUM_HEADS = gl.constexpr(NUM_HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.BOX = gl.constexpr(BOX)
        self.D = gl.constexpr(D)
        self.STRIPES = gl.constexpr(STRIPES)
        self.STEP = gl.constexpr(sizes["STEP"])
        self.STAGES = gl.constexpr(sizes["STAGES"])
        self.SLOTS = gl.constexpr(sizes["SLOTS"])
        self.BLOCKS = gl.constexpr(sizes["STEP"] // BLOCK_N)
        self.BOXES = gl.constexpr(sizes["STEP"] // BOX)
        self.PLACES = gl.constexpr(sizes["STEP"] if STRIPES else sizes["STEP"] // BOX)
        self.PARTS = gl.constexpr(D // COLUMNS.value)
        self.PIECES = gl.constexpr(sizes["STEP"] // ATOM_ROWS.value)
        self.TURNS = gl.constexpr(D == 128 and not STRIPES)
        self.scores_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes["STEP"], 16]))
        self.outputs_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))

    @gluon.jit
    def first_blocks(self, num_blocks):
        """Return the number of blocks of step 0 that makes all other steps full."""
        return (num_blocks - 1) % self.BLOCKS + 1

    @gluon.jit
    def block_steps(self, num_blocks):
        """Return the number of steps over an item's blocks."""
        return (num_blocks - self.first_blocks(num_blocks)) // self.BLOCKS + 1

    @gluon.jit
    def stripe_steps(self, num_stripes):
        """Return the number of steps over an item's stripes."""
        return gl.cdiv(num_stripes, self.STEP)


@aggregate
class Item:
    """One query head and tile. All fields are int32 scalars."""

    i_head: gl.tensor  # negative: no item is left
    token: gl.tensor  # of the first query, in q
    length: gl.tensor  # queries
    position: gl.tensor  # of the first query, in its sequence
    num_blocks: gl.tensor
    num_stripes: gl.tensor
    tail: gl.tensor  # keys of the last block up to the row's end, or BLOCK_N or more


WORDS = Constant(8)
"""Words of an item in shared memory: seven, padded for accesses of 16 bytes."""


@gluon.jit
def store_item(words, slot, item):
    """Store an item in words [SLOTS · WORDS, 1]. Synchronises the warp's threads, so that a signal may follow."""
    _store_word(words, slot * WORDS, item.i_head)
    _store_word(words, slot * WORDS + 1, item.token)
    _store_word(words, slot * WORDS + 2, item.length)
    _store_word(words, slot * WORDS + 3, item.position)
    _store_word(words, slot * WORDS + 4, item.num_blocks)
    _store_word(words, slot * WORDS + 5, item.num_stripes)
    _store_word(words, slot * WORDS + 6, item.tail)
    barrier()


@gluon.jit
def load_item(words, slot):
    """Load an item from words [SLOTS · WORDS, 1]. The compiler drops words that are not used."""
    first = slot * WORDS
    return Item(
        as_scalar(words.index(first)), as_scalar(words.index(first + 1)), as_scalar(words.index(first + 2)),
        as_scalar(words.index(first + 3)), as_scalar(words.index(first + 4)), as_scalar(words.index(first + 5)),
        as_scalar(words.index(first + 6)),
    )  # fmt: skip


@gluon.jit
def _store_word(words, i, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words.index(i).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def as_scalar(word):
    """Load the only element of a buffer [1] in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(word.load(layout), 0)


@aggregate
class Turns:
    """Makes the two consumer groups issue their matrix products in turn, if ``config.TURNS`` is set.

    One group's softmax then runs in parallel with the other's products. At head_dim 128, long lists take 2 % less time,
    and short lists 1 % more. At 64 and 256, both take longer.
    """

    this: gl.shared_memory_descriptor  # the barrier that gives this group its turn; unused without turns
    other: gl.shared_memory_descriptor  # the barrier that gives the other group its turn
    ENABLED: gl.constexpr

    @gluon.jit
    def acquire(self, step):
        """Wait for this group's turn."""
        if self.ENABLED:
            mbarrier.wait(self.this, step.count & 1)

    @gluon.jit
    def release(self):
        """Give the other group its turn."""
        if self.ENABLED:
            mbarrier.arrive(self.other, count=1)


@aggregate
class Barriers:
    """The barriers of the channels, of the scheduler, and between the consumers."""

    item_full: gl.shared_memory_descriptor  # the scheduler has written an item
    places_full: gl.shared_memory_descriptor
    places_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor  # one per slot, and one for values past the row's end, before they are zeroed
    v_empty: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor  # see ``Turns``


@aggregate
class Channels:
    """Buffers and barriers between warps. Producers and consumers see the buffers as tiles of their own shapes."""

    place_buffers: gl.shared_memory_descriptor  # [AHEAD, PLACES] int32
    q_buffers: gl.shared_memory_descriptor  # the queries of SLOTS items
    k_buffers: gl.shared_memory_descriptor  # the keys of STAGES steps
    v_buffers: gl.shared_memory_descriptor  # the values of STAGES steps
    item_words: gl.shared_memory_descriptor  # [SLOTS · WORDS, 1] int32: items
    barriers: Barriers

    @gluon.jit
    def await_item(self, counter):
        """Wait for the scheduler's next item, as a producer. The buffer of its queries is then free."""
        mbarrier.wait(self.barriers.item_full.index(counter.slot()), counter.parity())
        return load_item(self.item_words, counter.slot())

    @gluon.jit
    def places(self):
        """Channel of the steps' places, from the scheduler to the producers."""
        return Channel(self.place_buffers, self.barriers.places_full, self.barriers.places_empty)

    @gluon.jit
    def queries(self):
        """Channel of items: full once their queries have arrived and their words are written."""
        return Channel(self.q_buffers, self.barriers.q_full, self.barriers.q_empty)

    @gluon.jit
    def keys(self):
        """Channel of the steps' keys."""
        return Channel(self.k_buffers, self.barriers.k_full, self.barriers.k_empty)

    @gluon.jit
    def values(self):
        """Channel of the steps' values."""
        return Channel(self.v_buffers, self.barriers.v_full, self.barriers.v_empty)
