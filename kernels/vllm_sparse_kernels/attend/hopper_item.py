# SPDX-License-Identifier: Apache-2.0
"""What the producer and the consumers of ``hopper_kernel`` agree on: what an item is, and how they tell of it."""

from vllm_sparse_kernels.gluon_names import barrier, gl, gluon

HALF = gl.constexpr(64)
"""Queries of a consumer group, and the columns of 16 bits that shared memory's swizzle of 128 bytes spans."""

WORDS = gl.constexpr(8)
"""Room for what the producer tells of an item: head, first token, number and position of queries, blocks, stripes."""


@gluon.jit
def publish(items, slot, i_head, token, length, first, num_blocks, num_stripes):
    """Tell the consumers what an item is; what signals it comes after."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = (i_head, token, length, first, num_blocks, num_stripes)
    for i in gl.static_range(6):
        items.index(slot * WORDS + i).store(gl.full([1], words[i], gl.int32, layout))
    barrier()


@gluon.jit
def published(items, slot, WORD: gl.constexpr):
    """One word of the item in a slot, the same in all threads."""
    return gl.max(items.index(slot * WORDS + WORD).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def first_step(num_blocks, BLOCKS: gl.constexpr):
    """How many blocks step 0 takes, so that whole steps are left."""
    return (num_blocks - 1) % BLOCKS + 1
