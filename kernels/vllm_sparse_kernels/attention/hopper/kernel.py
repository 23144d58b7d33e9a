# SPDX-License-Identifier: Apache-2.0
"""The Gluon kernel of ``hopper``: a scheduler, two producers and two consumer groups, persistent, heaviest work first.

A work item is one (query head, tile). The scheduler, a warp, takes items from a counter and looks up where their keys
are. One producer warp loads a tile's queries and keys, another its values, in steps of 128 keys: one block of 128, two
of 64 or four of 32 by bulk copies, or 128 gathered stripes. A bulk copy reads a whole block, or the part of a block
that lies within a page.
Each consumer group computes 64 of the tile's queries. While the scores of a step go through the softmax, the product of
the previous step with its values runs. While the consumers write an item, the producers load the next item. At head_dim
128, the two groups issue their products in turn, and one group's softmax also runs in parallel with the other's
products.

The lookups of an item depend on each other, and take about one and a half steps. The scheduler runs up to AHEAD steps
ahead to hide them.

At head_dim 256, shared memory has room for steps of 64 keys and for one tile of queries instead of two. The scheduler
then begins an item once the consumers have computed the last scores of the previous item.

An item's steps run from the diagonal backwards, then through the stripes:

    step 0            the list's last blocks, as many as make all other steps full; always masked
    masked steps      further blocks that touch the diagonal (tiles and blocks may not be aligned)
    block steps       all queries see all keys
    stripe steps      the last step is masked if it is not full

One thread of a group arrives at a barrier for all four warps, and all four wait. Before a group releases a slot, its
warps must therefore have synchronised since they read it. Triton synchronises consumers between their wait for a
product and the arrival. All other groups are single warps. Tests check the consumers in the SASS, and launch the kernel
thousands of times on a card, also next to other processes.

Items do not overlap: computing an item's first scores while the previous item is written gave NaN on a card that also
ran other processes.

ptxas tends to hoist the wait for P·V above all exponentials of the step, which undoes the overlap. A wait for the next
step's keys between the two preserves the order, with Triton 3.6 to 3.9. A test checks it in the SASS, and
``tests/kernels/attention/test_hopper_compiles.py`` checks the machine code.

``item.py`` has the types that all warps share: ``Config``, ``Channels``, ``Item``.
"""

from vllm_sparse_kernels.attention.hopper.consumer import consume
from vllm_sparse_kernels.attention.hopper.item import (
    AHEAD,
    ATOM_ROWS,
    COLUMNS,
    HALF,
    WORDS,
    Barriers,
    Channels,
    Config,
)
from vllm_sparse_kernels.attention.hopper.producer import load_keys, load_values
from vllm_sparse_kernels.attention.hopper.scheduler import schedule
from vllm_sparse_kernels.gluon_compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    new_barriers,
    reinterpret,
)


@gluon.jit(do_not_specialize=["num_tiles"])
def hopper_kernel(
    q_desc, k_desc, v_desc, out, cache, head_strides, index, work, num_tiles, scale,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STRIPES: gl.constexpr,
):  # fmt: skip
    """O = softmax(scale · Q Kᵀ) V over the index's keys, for all (query head, tile) items.

    A program takes items until none is left. Products have 16-bit operands. Scores, sums and outputs are float32, and
    outputs are stored in 16 bits.

    Grid: one program per multiprocessor, at most one per item; two consumer groups of 4 warps, a scheduler warp and two
    producer warps. Bound by the matrix units; the softmax runs in parallel with them.

    Args:
        q_desc: Descriptor of q as the matrix [num_tokens, NUM_HEADS · D] of fp16 or bf16, boxes of [64, 64].
        k_desc: Descriptor of the cache's keys as a matrix whose rows are tokens, boxes of [BOX, 64].
        out: ``AttendArgs``: output [num_tokens, NUM_HEADS, D], written; and sinks.
        head_strides: ``HeadStrideArgs``.
        work: ``WorkArgs``, from ``prepare_kernel``.
    """
    config = Config(NUM_HEADS, GROUP, BLOCK_N, k_desc.block_type.shape[0], D, STRIPES)
    dtype: gl.constexpr = k_desc.dtype
    SLOTS: gl.constexpr = config.SLOTS
    STAGES: gl.constexpr = config.STAGES
    STEP: gl.constexpr = config.STEP
    PARTS: gl.constexpr = config.PARTS
    step_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, D], dtype)
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, COLUMNS], dtype)
    piece_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ATOM_ROWS, COLUMNS], dtype)
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], dtype)
    word_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    # Consumers see halves of tiles and whole steps. Producers fill parts and pieces of the same memory.
    q_parts = gl.allocate_shared_memory(dtype, [SLOTS * 2 * PARTS, HALF, COLUMNS], part_layout)
    k_steps = gl.allocate_shared_memory(dtype, [STAGES, STEP, D], step_layout)
    v_steps = gl.allocate_shared_memory(dtype, [STAGES, STEP, D], step_layout)
    item_words = gl.allocate_shared_memory(gl.int32, [SLOTS * WORDS, 1], word_layout)
    places = gl.allocate_shared_memory(gl.int32, [AHEAD, config.PLACES], word_layout)
    PIECES: gl.constexpr = STAGES * PARTS * config.PIECES
    k_pieces = reinterpret(k_steps, dtype, [PIECES, ATOM_ROWS, COLUMNS], piece_layout)
    v_pieces = reinterpret(v_steps, dtype, [PIECES, ATOM_ROWS, COLUMNS], piece_layout)
    q_halves = reinterpret(q_parts, dtype, [SLOTS * 2, HALF, D], half_layout)

    # In this order, and without unused barriers: Triton would reuse the memory of a barrier that nothing waits for.
    item_full = new_barriers(SLOTS, 1)
    places_full = new_barriers(AHEAD, 1)
    places_empty = new_barriers(AHEAD, 2)
    q_full = new_barriers(SLOTS, 1)
    q_empty = new_barriers(SLOTS, 3)  # the consumers, and the values' producer, which has read the item's words
    k_full = new_barriers(STAGES, 1)
    k_empty = new_barriers(STAGES, 2)
    v_full = new_barriers(STAGES + 1, 1)
    v_empty = new_barriers(STAGES, 2)
    turns = k_full  # a placeholder if there are no turns
    if config.TURNS:
        turns = new_barriers(2, 1)
        mbarrier.arrive(turns.index(0), count=1)
    fence_async_shared()
    barrier()
    barriers = Barriers(
        item_full, places_full, places_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns
    )  # fmt: skip
    consumer_channels = Channels(places, q_halves, k_steps, v_steps, item_words, barriers)
    producer_channels = Channels(places, q_parts, k_pieces, v_pieces, item_words, barriers)
    # Registers are assigned by warp group: two groups of consumers and one of the other warps share 504 per thread.
    CONSUMER_REGISTERS: gl.constexpr = 232 if STRIPES else 240
    PRODUCER_REGISTERS: gl.constexpr = 40 if STRIPES else 24
    gl.warp_specialize(
        [
            (consume, (out, scale, consumer_channels, config, 0)),
            (consume, (out, scale, consumer_channels, config, 1)),
            (schedule, (index, work, num_tiles, producer_channels, config)),
            (load_keys, (q_desc, k_desc, cache, head_strides, producer_channels, config)),
            (load_values, (v_desc, cache, head_strides, producer_channels, config)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
