# SPDX-License-Identifier: Apache-2.0
"""The Gluon kernel of ``hopper``: one producer and two consumer groups, persistent, heaviest work first.

A work item is one (query head, tile). The producer takes items off a counter, loads a tile's queries and then its keys
and values step by step, 128 keys a step: one block of 128, two of 64 or four of 32 by bulk copies, or 128 stripes
gathered. Each consumer group owns 64 of the tile's queries. While one step's scores go through the softmax, the product
of the step before with its values runs; while the consumers write an item out, the producer loads the next one. At
head_dim 128 the two groups ask for their products in turn, and one's softmax runs beside the other's products as well.

At head_dim 256 shared memory has room for steps of 64 keys, and for one tile of queries in place of two: the producer
begins an item once the consumers have made the last scores of the one before, and have read all that it told of it.

An item's steps run from the diagonal backwards, then through the stripes:

    step 0            the list's last blocks, as many as leave whole steps before it; always masked
    masked steps      further blocks that touch the diagonal (tiles may lie askew)
    block steps       all queries see all keys
    stripe steps      the last one, where it is not full, masked

One thread of a group arrives at a barrier for all four warps, and all four wait. So before a group hands anything back,
something must have held its warps together since they looked at it: Triton has consumers meet between their wait for a
product and the arrival, and a group of producers meets after each wait for room. Tests read the former off the SASS,
and launch the kernel thousands of times on a card, beside other processes too.

Items do not overlap: multiplying an item's first scores while the one before is written out gave NaN on a card beside
other processes.

ptxas likes to hoist the wait for P·V above all exponents of the step, which undoes the overlap. Waiting for the next
step's keys between the two keeps it where it stands, with every Triton from 3.6 to 3.9; a test reads it off the SASS,
and ``make compile-matrix`` off what each release compiles.
"""

from vllm_sparse_kernels.attend.hopper_consumer import consume
from vllm_sparse_kernels.attend.hopper_item import HALF, WORDS
from vllm_sparse_kernels.attend.hopper_producer import SWEEP, produce
from vllm_sparse_kernels.gluon_names import barrier, fence_async_shared, gl, gluon, mbarrier, new_barriers, reinterpret


@gluon.jit(do_not_specialize=["num_tiles"])
def hopper_kernel(
    q_desc, k_desc, v_desc, out, cache, matrix, index, lists, counter, num_tiles, scale,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    FIELDS: gl.constexpr, STEP: gl.constexpr, SLOTS: gl.constexpr, STRIPES: gl.constexpr,
):  # fmt: skip
    """O = softmax(scale · Q Kᵀ) V of all (query head, tile) items, as ``portable_kernel.attend_kernel`` has it.

    q, keys and values come by descriptors of matrices whose rows are tokens and whose columns are heads · D; tiles have
    128 queries, 64 for each consumer; scores, sums and outputs are float32 until they are stored in 16 bits.
    ``lists``: where blocks and stripes lie, and the order of the work; ``counter`` [1] int32: the next item.
    """
    dtype: gl.constexpr = k_desc.dtype
    PARTS: gl.constexpr = D // HALF
    TURNS: gl.constexpr = D == 128 and not STRIPES
    SHAPE: gl.constexpr = (NUM_HEADS, BLOCK_N, D, STAGES, FIELDS, STEP, SLOTS, TURNS)
    step_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, D], dtype)
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HALF], dtype)
    piece_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SWEEP, HALF], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], dtype)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    q_tiles = gl.allocate_shared_memory(dtype, [SLOTS * 2 * PARTS, HALF, HALF], half_layout)
    k_steps = gl.allocate_shared_memory(dtype, [STAGES, STEP, D], step_layout)
    v_steps = gl.allocate_shared_memory(dtype, [STAGES, STEP, D], step_layout)
    items = gl.allocate_shared_memory(gl.int32, [SLOTS * WORDS, 1], word)
    PIECES: gl.constexpr = STAGES * PARTS * (STEP // SWEEP)
    k_pieces = reinterpret(k_steps, dtype, [PIECES, SWEEP, HALF], piece_layout)
    v_pieces = reinterpret(v_steps, dtype, [PIECES, SWEEP, HALF], piece_layout)
    q_halves = reinterpret(q_tiles, dtype, [SLOTS * 2, HALF, D], q_layout)

    q_full = new_barriers(SLOTS, 1)
    q_empty = new_barriers(SLOTS, 2)
    k_full = new_barriers(STAGES, 1)
    k_empty = new_barriers(STAGES, 2)
    v_full = new_barriers(STAGES, 1)
    v_empty = new_barriers(STAGES, 2)
    mended = new_barriers(1, 1)
    turns = k_full  # where there are none: barriers of their own that nobody waits for would share memory with data
    if TURNS:
        turns = new_barriers(2, 1)
        mbarrier.arrive(turns.index(0), count=1)
    fence_async_shared()
    barrier()
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, mended, turns)
    consumed = (q_halves, k_steps, v_steps, items)
    produced = (q_tiles, k_pieces, v_pieces, items)
    # Gathering takes a warp group of producers; registers are handed out by groups, 512 a thread for all three.
    WARPS: gl.constexpr = 4 if STRIPES else 1
    CONSUMER_REGISTERS: gl.constexpr = 232 if STRIPES else 240
    REGISTERS: gl.constexpr = 40 if STRIPES else 24
    gl.warp_specialize(
        [
            (consume, (out, scale, consumed, barriers, 0, SHAPE, STRIPES)),
            (consume, (out, scale, consumed, barriers, 1, SHAPE, STRIPES)),
            (
                produce,
                (
                    q_desc, k_desc, v_desc, cache, matrix, index, lists, counter, num_tiles, produced, barriers,
                    GROUP, SHAPE, STRIPES,
                ),
            ),
        ],
        [4, WARPS],
        [CONSUMER_REGISTERS, REGISTERS],
    )  # fmt: skip
