# SPDX-License-Identifier: Apache-2.0
"""SALE's third step on Hopper, in Gluon: what ``sale_scores`` does, in half precision.

A warp group holds the scores of two tiles. While it looks at those of one, the matrix units multiply the other's: they
always have work queued, of two such programs on each multiprocessor. Keys come by bulk copies, three steps ahead. Per
score there is one fused multiply-add and one maximum, two scores to an instruction.

Where half precision may not have all sums exactly a program leaves its part, with a mark, to ``sale_scores``.
"""

from vllm_sparse_kernels.gluon_names import (
    barrier,
    bulk_load,
    fence_async_shared,
    gl,
    gluon,
    larger_pairs,
    mbarrier,
    new_barriers,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STAGES = 4
"""Steps of keys in shared memory, and of one round of the loop."""

STEP_TOKENS = gl.constexpr(128)
"""Keys of one step, and queries of a tile."""

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_TOKENS.value, 32]))
"""How a warp group holds the scores of a tile and a step."""


@gluon.jit
def _local_start(end, sink_tokens, local_tokens):
    """That of ``sale_rounding``, which Gluon cannot call."""
    between = (end + 31) // 32 * 32 - sink_tokens - local_tokens
    return gl.where(between >= 0, sink_tokens + between // 128 * 128, 0)


@gluon.jit
def _largest(b_s):
    """[queries, keys / 32, 4] float32: largest of the eight scores that share a key step. One thread has them."""
    NUM: gl.constexpr = b_s.shape[1] // 32
    b_s = b_s.reshape([b_s.shape[0], NUM, 2, 2, 4, 2]).permute((0, 1, 4, 5, 2, 3))
    b_even, b_odd = b_s.split()
    b_0, b_2 = b_even.split()
    b_1, b_3 = b_odd.split()
    return gl.max(larger_pairs(larger_pairs(larger_pairs(b_0, b_1), b_2), b_3).to(gl.float32), 3)


@gluon.jit
def _over(b_s, b_inverse, b_bias, b_step, b_threshold, BLOCKS: gl.constexpr):
    """By how much the best score of every index block is over its threshold: one element of a block a thread."""
    M: gl.constexpr = b_s.shape[0]
    b_s = gl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [b_inverse[:, None], b_bias[None, :], b_s],
        gl.float16,
        is_pure=True,
        pack=2,
    )
    b_top = _largest(b_s)
    b_top = b_top * gl.convert_layout(b_step, gl.SliceLayout(0, b_top.type.layout))[None, :, :]
    b_top = gl.max(b_top.reshape([M, BLOCKS, b_top.shape[1] // BLOCKS, 4]), 2)
    thresholds: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, b_top.type.layout))
    b_over = b_top - gl.convert_layout(b_threshold, thresholds)[:, None, None]
    # Queries 8 and 64 apart lie in one thread.
    b_over = b_over.reshape([M // 64, 4, 2, 8, BLOCKS, 4])
    return gl.max(gl.max(b_over, 2), 0)


@gluon.jit
def _store_flags(target, b_over, i_block, end_block, BLOCKS: gl.constexpr):
    """A 1 at ``target`` + b for each block b < ``end_block`` of the step that has an element over its threshold."""
    layout: gl.constexpr = b_over.type.layout
    blocks: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    o_b = i_block + gl.arange(0, BLOCKS, blocks)
    o_b = o_b[None, None, :, None] + gl.zeros(b_over.shape, gl.int32, layout)
    gl.store(target + o_b, gl.full(b_over.shape, 1, gl.uint8, layout), mask=(b_over >= 0) & (o_b < end_block))


@gluon.jit
def _fits_half(queries, keys, i_group, i_kv, i_tile, num_tiles, first, begin, end, shift, SPAN: gl.constexpr):
    """Whether half precision has all sums of products exactly, and biases in range."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_m = gl.arange(0, 2 * STEP_TOKENS, line)
    o_q = i_group.to(gl.int64) * queries.num_queries + i_tile * STEP_TOKENS + o_m
    in_tiles = o_m < num_tiles * STEP_TOKENS
    square = gl.max(gl.load(queries.squares + o_q, mask=in_tiles, other=0.0), 0)
    inverse = gl.max(gl.load(queries.inverse_steps + o_q, mask=in_tiles, other=0.0), 0)
    o_n = first // 64 + gl.arange(0, SPAN // 64, line)
    tested = (o_n >= begin // 64) & (o_n < (end + 63) // 64)
    o_n += shift // 64
    num_parts = keys.num_keys // 64
    longest = square * gl.max(gl.load(keys.squares + i_kv * num_parts + o_n, mask=tested, other=0.0), 0)
    bias = gl.max(gl.load(keys.largest_biases + i_group * num_parts + o_n, mask=tested, other=0.0), 0)
    in_range = (inverse <= 32768) & (bias <= 32768) & (inverse * bias <= 2048.0)
    return in_range & (longest <= 2048.0 * 2048.0)


@gluon.jit(do_not_specialize=["sink_tokens", "local_tokens"])
def half_kernel(
    queries, keys, bulk_queries, bulk_keys, heads, log_taus, kept, index, pairs, sink_tokens, local_tokens, left,
    GROUP: gl.constexpr, BLOCK_D: gl.constexpr, INDEX_N: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    FIELDS: gl.constexpr, PAIR_FIELDS: gl.constexpr,
):  # fmt: skip
    """``sale_scores._test_kernel``, where its products fit half precision."""
    i_group = gl.program_id(2)
    pair = pairs + gl.program_id(0) * PAIR_FIELDS
    i_tile = gl.load(pair)
    num_tiles = gl.load(pair + 1)
    tile = index.tiles + i_tile * FIELDS
    other = tile + (num_tiles - 1) * FIELDS
    stop_a = _local_start(gl.load(tile + 3) + gl.minimum(gl.load(tile + 2), 64), sink_tokens, local_tokens) // INDEX_N
    stop_b = _local_start(gl.load(other + 3) + gl.minimum(gl.load(other + 2), 64), sink_tokens, local_tokens) // INDEX_N
    first = gl.program_id(1) * SPAN
    begin = gl.maximum((sink_tokens + INDEX_N - 1) // INDEX_N * INDEX_N, first)
    end = gl.minimum(stop_b * INDEX_N, first + SPAN)
    tests = (begin < end) & (gl.load(log_taus + i_group) > float("-inf"))
    leaves = False
    if tests:
        shift = gl.multiple_of(gl.load(pair + 2), STEP_TOKENS)
        i_kv = gl.load(heads + i_group) // GROUP
        leaves = not _fits_half(queries, keys, i_group, i_kv, i_tile, num_tiles, first, begin, end, shift, SPAN)
        if not leaves:
            target = kept + i_group.to(gl.int64) * index.stride_blocks
            target_a = target + gl.load(index.block_offsets + i_tile)
            target_b = target + gl.load(index.block_offsets + i_tile + num_tiles - 1)
            where = (i_group, i_kv, i_tile, begin, end, shift)
            # The last round may have steps past the end.
            stop_a = gl.minimum(stop_a, end // INDEX_N)
            stop_b = gl.where(num_tiles > 1, gl.minimum(stop_b, end // INDEX_N), 0)
            _test_span(
                queries, keys, bulk_queries, bulk_keys, where, target_a, target_b, stop_a, stop_b,
                BLOCK_D, INDEX_N, STAGES,
            )  # fmt: skip
    i_program = (i_group * gl.num_programs(0) + gl.program_id(0)) * gl.num_programs(1) + gl.program_id(1)
    gl.store(left + i_program, gl.cast(leaves, gl.uint8))


@gluon.jit
def _test_span(
    queries, keys, bulk_queries, bulk_keys, where, target_a, target_b, stop_a, stop_b,
    BLOCK_D: gl.constexpr, INDEX_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Step 3 for two tiles of one head and the keys [begin, end): ``sale_scores._test_span`` by products in fp8.

    Queries and keys are integers −7 … 7 in e4m3, [64, BLOCK_D] a step; their sums of products are exact in half
    precision. Flags of the tiles' blocks of INDEX_N keys go to ``target_a`` and ``target_b``.
    """
    i_group, i_kv, i_tile, begin, end, shift = where
    N: gl.constexpr = STEP_TOKENS
    BLOCKS: gl.constexpr = N // INDEX_N
    q_shared, k_shared, ready = _room(BLOCK_D, STAGES)
    row = (i_group * queries.num_queries + i_tile * N).to(gl.int32)
    first_step = begin // N
    num_steps = (end + N - 1) // N - first_step
    key = (i_kv * keys.num_keys + shift + first_step * N).to(gl.int32)
    _load_first(bulk_queries, bulk_keys, row, key, num_steps, q_shared, k_shared, ready, STAGES)

    thr_a, thr_b, inv_a, inv_b = _of_queries(queries, i_group.to(gl.int64) * queries.num_queries + i_tile * N, stop_b)
    zero = gl.zeros([N, N], gl.float16, SCORES)
    steps, biases = _of_keys(keys, i_group, i_kv, shift + first_step * N, zero)
    b_bias = gl.load(biases)
    b_step = gl.load(steps)

    mbarrier.wait(ready.index(STAGES), 0)
    mbarrier.wait(ready.index(0), 0)
    q_a = q_shared.index(0)
    q_b = q_shared.index(1)
    # Results under way must not cross the loop's end: the assembler would wait for each instruction of every product.
    for i in range(0, num_steps, STAGES):
        phase = (i // STAGES) & 1
        a_t = warpgroup_mma(q_a, k_shared.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        for slot in gl.static_range(STAGES):
            b_t = warpgroup_mma(q_b, k_shared.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            step = i + slot
            after = gl.minimum(step + 1, num_steps - 1)
            next_bias = gl.load(biases + after * N)
            next_step = gl.load(steps + after * (N // 8))
            b_a = warpgroup_mma_wait(1, deps=(a_t,))
            i_block = (first_step + step) * BLOCKS
            _store_flags(target_a, _over(b_a, inv_a, b_bias, b_step, thr_a, BLOCKS), i_block, stop_a, BLOCKS)
            # Waiting for the next keys here also keeps the assembler from waiting for b_t above all of that.
            more = step + 1 < num_steps
            if slot + 1 < STAGES:
                mbarrier.wait(ready.index(slot + 1), phase, pred=more)
                k_next = k_shared.index(slot + 1).permute((1, 0))
                a_t = warpgroup_mma(q_a, k_next, zero, use_acc=False, is_async=True)
                b_b = warpgroup_mma_wait(1, deps=(b_t,))
            else:
                b_b = warpgroup_mma_wait(0, deps=(b_t,))
            barrier()
            _load_step(bulk_keys, key, step + STAGES, num_steps, ready.index(slot), k_shared.index(slot))
            _store_flags(target_b, _over(b_b, inv_b, b_bias, b_step, thr_b, BLOCKS), i_block, stop_b, BLOCKS)
            b_bias = next_bias
            b_step = next_step
        mbarrier.wait(ready.index(0), phase ^ 1, pred=i + STAGES < num_steps)


@gluon.jit
def _room(BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for two tiles and STAGES steps of keys, and what says that each step, and the tiles, are there."""
    N: gl.constexpr = STEP_TOKENS
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, BLOCK_D], gl.float8e4nv)
    q_shared = gl.allocate_shared_memory(gl.float8e4nv, [2, N, BLOCK_D], shared)
    k_shared = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, N, BLOCK_D], shared)
    ready = new_barriers(STAGES + 1, 1)
    fence_async_shared()
    barrier()
    return q_shared, k_shared, ready


@gluon.jit
def _load_first(bulk_queries, bulk_keys, row, key, num_steps, q_shared, k_shared, ready, STAGES: gl.constexpr):
    """Both tiles, and the first steps of keys."""
    N: gl.constexpr = STEP_TOKENS
    q_ready = ready.index(STAGES)
    mbarrier.expect(q_ready, 2 * N * q_shared.shape[2])
    bulk_load(bulk_queries, [row, 0], q_ready, q_shared.index(0))
    bulk_load(bulk_queries, [row + N, 0], q_ready, q_shared.index(1))
    for i in gl.static_range(STAGES):
        _load_step(bulk_keys, key, i, num_steps, ready.index(i), k_shared.index(i))


@gluon.jit
def _load_step(bulk_keys, key, step, num_steps, ready, room):
    """Begin to copy a step of keys [STEP_TOKENS, channels], a byte each; ``ready`` completes when it is there."""
    mbarrier.expect(ready, STEP_TOKENS * room.shape[1], pred=step < num_steps)
    bulk_load(bulk_keys, [key + step * STEP_TOKENS, 0], ready, room, pred=step < num_steps)


@gluon.jit
def _of_queries(queries, first, stop_b):
    """Thresholds and inverse steps of both tiles' queries; nothing passes those of a second tile that is not there."""
    o_m = gl.arange(0, STEP_TOKENS, gl.SliceLayout(1, SCORES))
    o_q = first + o_m
    there = o_m < gl.where(stop_b > 0, STEP_TOKENS, 0)
    thr_a = gl.load(queries.thresholds + o_q)
    thr_b = gl.load(queries.thresholds + o_q + STEP_TOKENS, mask=there, other=float("inf"))
    inv_a = gl.load(queries.inverse_steps + o_q).to(gl.float16)
    inv_b = gl.load(queries.inverse_steps + o_q + STEP_TOKENS, mask=there, other=0.0).to(gl.float16)
    return thr_a, thr_b, inv_a, inv_b


@gluon.jit
def _of_keys(keys, i_group, i_kv, first, zero):
    """Where the first step's key steps and biases lie, in the layouts of the largest scores and of scores."""
    # The layout in which the largest scores come out, found on a tile of zeros that is never computed.
    groups: gl.constexpr = gl.SliceLayout(0, _largest(zero).type.layout)
    o_step = gl.arange(0, STEP_TOKENS // 32, gl.SliceLayout(1, groups))[:, None] * 4
    o_step = o_step + gl.arange(0, 4, gl.SliceLayout(0, groups))[None, :]
    steps = keys.steps + (i_kv.to(gl.int64) * keys.num_keys + first) // 8 + o_step
    biases = keys.half_biases + i_group.to(gl.int64) * keys.num_keys + first
    return steps, biases + gl.arange(0, STEP_TOKENS, gl.SliceLayout(0, zero.type.layout))
