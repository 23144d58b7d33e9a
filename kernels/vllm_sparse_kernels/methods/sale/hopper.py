# SPDX-License-Identifier: Apache-2.0
"""SALE's third step on Hopper, in Gluon: the test of ``scores.py`` in half precision.

A warp group holds the scores of two tiles. While it processes the scores of one tile, the matrix units compute the
scores of the other tile. With two such programs per multiprocessor, the matrix units always have work queued. Bulk
copies load keys three steps ahead. A score takes one fused multiply-add and one maximum, each instruction handling two
scores.

If half precision may not represent all sums exactly, a program marks its part for ``scores.py`` and does not test it.
"""

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.gluon_compat import (
    aggregate,
    barrier,
    bulk_load,
    fence_async_shared,
    gl,
    gluon,
    larger_pairs,
    mbarrier,
    new_barriers,
    tile_of,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from vllm_sparse_kernels.selection.slabs import SET_FIELDS

STAGES = Constant(4)
"""Number of steps of keys that shared memory holds and that each round of the loop handles."""

STEP_TOKENS = Constant(128)
"""Keys of one step, and queries of a tile."""

SCORES = Constant(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_TOKENS.value, 32]))
"""Layout in a warp group of the scores of a tile and a step."""


@aggregate
class Work:
    """Work of one program: up to two tiles of one head, and the keys [begin, end). All fields are scalars."""

    i_selected: gl.tensor  # place of the head among the selected heads
    i_kv: gl.tensor
    i_tile: gl.tensor  # the first tile; the second tile follows
    num_tiles: gl.tensor  # 1 or 2
    begin: gl.tensor  # position of the first key: the first block that any tile tests
    end: gl.tensor
    key_start: gl.tensor  # where the row's keys begin in the slab, a multiple of 128


@aggregate
class Flags:
    """Destination of the flags of a tile's blocks."""

    target: gl.tensor  # [num_blocks] uint8 by pointer
    stop: gl.tensor  # blocks from this one on are not stored

    @gluon.jit
    def store(self, b_excess, i_block, BLOCKS: gl.constexpr):
        """Store a 1 for each block that has an element over its threshold."""
        layout: gl.constexpr = b_excess.type.layout
        blocks: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
        o_b = i_block + gl.arange(0, BLOCKS, blocks)
        o_b = o_b[None, None, :, None] + gl.zeros(b_excess.shape, gl.int32, layout)
        b_flag = gl.full(b_excess.shape, 1, gl.uint8, layout)
        gl.store(self.target + o_b, b_flag, mask=(b_excess >= 0) & (o_b < self.stop))


@aggregate
class QueryTile:
    """Thresholds of the scores of a tile's queries."""

    b_threshold: gl.tensor  # [128] float32, divided by the query's scale
    b_inverse: gl.tensor  # [128] float16, inverse of the query's scale


@aggregate
class KeyStep:
    """Biases and scales of the keys of one step."""

    b_bias: gl.tensor  # [128] float16
    b_scale: gl.tensor  # [4, 4] float32, each of 8 keys


@aggregate
class KeySteps:
    """Biases and scales of all steps of keys of the span."""

    biases: gl.tensor  # pointers to the first step's
    scales: gl.tensor

    @gluon.jit
    def load(self, i_step):
        """Load the biases and scales of a step."""
        b_bias = gl.load(self.biases + i_step * STEP_TOKENS)
        b_scale = gl.load(self.scales + i_step * (STEP_TOKENS // 8))
        return KeyStep(b_bias, b_scale)


@aggregate
class Buffers:
    """Shared memory of a program."""

    queries: gl.shared_memory_descriptor  # [2, 128, BLOCK_D] e4m3
    keys: gl.shared_memory_descriptor  # [STAGES, 128, BLOCK_D] e4m3
    ready: gl.shared_memory_descriptor  # a barrier for each step of keys, and a last one for the queries


@gluon.jit
def _local_start(end, sink_tokens, local_tokens):
    """Return the same as ``rounding.local_start``, which Gluon cannot call."""
    between = (end + 31) // 32 * 32 - sink_tokens - local_tokens
    return gl.where(between >= 0, sink_tokens + between // 128 * 128, 0)


@gluon.jit
def _first_local(tile, sink_tokens, local_tokens):
    """Return the start of the local region of a tile's first query block, which tests the fewest keys."""
    end = tile.position() + gl.minimum(tile.length(), 64)
    return _local_start(end, sink_tokens, local_tokens)


@gluon.jit
def _largest(b_s):
    """Return the largest of the eight scores that share a key scale.

    The result is [queries, keys / 32, 4] float32, within one thread.
    """
    NUM: gl.constexpr = b_s.shape[1] // 32
    b_s = b_s.reshape([b_s.shape[0], NUM, 2, 2, 4, 2]).permute((0, 1, 4, 5, 2, 3))
    b_even, b_odd = b_s.split()
    b_0, b_2 = b_even.split()
    b_1, b_3 = b_odd.split()
    return gl.max(larger_pairs(larger_pairs(larger_pairs(b_0, b_1), b_2), b_3).to(gl.float32), 3)


@gluon.jit
def _excess(b_s, tile, key_step, BLOCKS: gl.constexpr):
    """Return by how much the best score of each index block exceeds its threshold.

    A thread holds one element of a block.
    """
    M: gl.constexpr = b_s.shape[0]
    b_s = gl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [tile.b_inverse[:, None], key_step.b_bias[None, :], b_s],
        gl.float16,
        is_pure=True,
        pack=2,
    )
    b_top = _largest(b_s)
    b_top = b_top * gl.convert_layout(key_step.b_scale, gl.SliceLayout(0, b_top.type.layout))[None, :, :]
    b_top = gl.max(b_top.reshape([M, BLOCKS, b_top.shape[1] // BLOCKS, 4]), 2)
    thresholds: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, b_top.type.layout))
    b_excess = b_top - gl.convert_layout(tile.b_threshold, thresholds)[:, None, None]
    # Queries 8 and 64 apart lie in one thread.
    b_excess = b_excess.reshape([M // 64, 4, 2, 8, BLOCKS, 4])
    return gl.max(gl.max(b_excess, 2), 0)


@gluon.jit
def _load_largest(pointers, mask):
    """Load the largest of some numbers >= 0."""
    return gl.max(gl.load(pointers, mask=mask, other=0.0), 0)


@gluon.jit
def _fits_half(queries, keys, work, first, SPAN: gl.constexpr):
    """Return whether half precision is sufficient for the keys from ``first`` on.

    All sums of products must be exact, and biases in range.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_m = gl.arange(0, 2 * STEP_TOKENS, line)
    o_q = work.i_selected.to(gl.int64) * queries.num_queries + work.i_tile * STEP_TOKENS + o_m
    in_tiles = o_m < work.num_tiles * STEP_TOKENS
    square = _load_largest(queries.squares + o_q, in_tiles)
    inverse = _load_largest(queries.inverse_scales + o_q, in_tiles)
    o_n = first // 64 + gl.arange(0, SPAN // 64, line)
    tested = (o_n >= work.begin // 64) & (o_n < (work.end + 63) // 64)
    o_n += work.key_start // 64
    num_parts = keys.num_keys // 64
    longest = square * _load_largest(keys.squares + work.i_kv * num_parts + o_n, tested)
    bias = _load_largest(keys.largest_biases + work.i_selected * num_parts + o_n, tested)
    in_range = (inverse <= 32768) & (bias <= 32768) & (inverse * bias <= 2048.0)
    return in_range & (longest <= 2048.0 * 2048.0)


@gluon.jit(do_not_specialize=["sink_tokens", "local_tokens"])
def half_kernel(
    queries, keys, bulk_queries, bulk_keys, heads, log_taus, kept, index, tile_sets, sink_tokens, local_tokens,
    untested, GROUP: gl.constexpr, INDEX_N: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """Flag the blocks in which an element passes, for two tiles of one head and SPAN keys.

    It replaces ``scores._test_kernel`` for spans whose products fit half precision.

    Grid: (tile sets, spans of the furthest tile's keys, selected heads), 4 warps. Two programs fit a
    multiprocessor. Bound by the instructions that test scores: a multiply-add and a maximum for two scores. Meanwhile
    the matrix units multiply the other tile.

    Args:
        queries: ``RoundedQueries``, integers [num_selected, num_queries, BLOCK_D] e4m3.
        keys: ``RoundedKeys``, integers [num_kv_heads, num_keys, BLOCK_D] e4m3.
        heads: [num_selected] int32.
        log_taus: [num_selected] float32, minus infinity for heads that keep everything.
        tile_sets: [num_sets, SET_FIELDS] int32: first tile, tiles, and where the row's keys begin in the slab.
        untested: [n, tile sets, spans] uint8: 1 where half precision does not fit, and nothing has been tested.
    """
    i_selected = gl.program_id(2)
    tile_set = tile_sets + gl.program_id(0) * SET_FIELDS
    i_tile = gl.load(tile_set)
    num_tiles = gl.load(tile_set + 1)
    tile = tile_of(index.tiles, i_tile)
    last_tile = tile_of(index.tiles, i_tile + num_tiles - 1)
    stop_a = _first_local(tile, sink_tokens, local_tokens) // INDEX_N
    stop_b = _first_local(last_tile, sink_tokens, local_tokens) // INDEX_N
    first = gl.program_id(1) * SPAN
    begin = gl.maximum(gl.cdiv(sink_tokens, INDEX_N) * INDEX_N, first)
    end = gl.minimum(stop_b * INDEX_N, first + SPAN)
    tests = (begin < end) & (gl.load(log_taus + i_selected) > float("-inf"))
    is_untested = False
    if tests:
        key_start = gl.multiple_of(gl.load(tile_set + 2), STEP_TOKENS)
        i_kv = gl.load(heads + i_selected) // GROUP
        work = Work(i_selected, i_kv, i_tile, num_tiles, begin, end, key_start)
        is_untested = not _fits_half(queries, keys, work, first, SPAN)
        if not is_untested:
            target = kept + i_selected.to(gl.int64) * index.stride_blocks
            target_a = target + gl.load(index.block_offsets + i_tile)
            target_b = target + gl.load(index.block_offsets + i_tile + num_tiles - 1)
            # The last round may have steps past the end.
            flags_a = Flags(target_a, gl.minimum(stop_a, end // INDEX_N))
            flags_b = Flags(target_b, gl.where(num_tiles > 1, gl.minimum(stop_b, end // INDEX_N), 0))
            _test_span(queries, keys, bulk_queries, bulk_keys, work, flags_a, flags_b, INDEX_N)
    i_program = (i_selected * gl.num_programs(0) + gl.program_id(0)) * gl.num_programs(1) + gl.program_id(1)
    gl.store(untested + i_program, gl.cast(is_untested, gl.uint8))


@gluon.jit
def _test_span(queries, keys, bulk_queries, bulk_keys, work, flags_a, flags_b, INDEX_N: gl.constexpr):
    """Run step 3 for two tiles of one head and the span's keys, as ``scores._test_span`` does, with products in fp8.

    Queries and keys are integers −7 … 7 in e4m3, [128, BLOCK_D] per step. The sums of their products are exact in half
    precision.
    """
    N: gl.constexpr = STEP_TOKENS
    BLOCKS: gl.constexpr = N // INDEX_N
    buffers = _allocate_buffers(bulk_keys)
    ready = buffers.ready
    query_row = (work.i_selected * queries.num_queries + work.i_tile * N).to(gl.int32)
    first_step = work.begin // N
    num_steps = gl.cdiv(work.end, N) - first_step
    key_row = (work.i_kv * keys.num_keys + work.key_start + first_step * N).to(gl.int32)
    _load_first(bulk_queries, bulk_keys, query_row, key_row, num_steps, buffers)

    first_query = work.i_selected.to(gl.int64) * queries.num_queries + work.i_tile * N
    tile_a, tile_b = _query_tiles(queries, first_query, flags_b.stop)
    zero = gl.zeros([N, N], gl.float16, SCORES)
    key_steps = _key_steps(keys, work.i_selected, work.i_kv, work.key_start + first_step * N, zero)
    key_step = key_steps.load(0)

    mbarrier.wait(ready.index(STAGES), 0)
    mbarrier.wait(ready.index(0), 0)
    b_q_a = buffers.queries.index(0)
    b_q_b = buffers.queries.index(1)
    # Products in flight must not cross the loop's end: the assembler would wait for each instruction of every product.
    for i in range(0, num_steps, STAGES):
        phase = (i // STAGES) & 1
        a_t = warpgroup_mma(b_q_a, buffers.keys.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        for slot in gl.static_range(STAGES):
            b_t = warpgroup_mma(b_q_b, buffers.keys.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            i_step = i + slot
            next_key_step = key_steps.load(gl.minimum(i_step + 1, num_steps - 1))
            b_s_a = warpgroup_mma_wait(1, deps=(a_t,))
            i_block = (first_step + i_step) * BLOCKS
            flags_a.store(_excess(b_s_a, tile_a, key_step, BLOCKS), i_block, BLOCKS)
            # Waiting for the next keys here also keeps the assembler from waiting for b_t above all of these
            # instructions.
            more = i_step + 1 < num_steps
            if slot + 1 < STAGES:
                mbarrier.wait(ready.index(slot + 1), phase, pred=more)
                b_k_next = buffers.keys.index(slot + 1).permute((1, 0))
                a_t = warpgroup_mma(b_q_a, b_k_next, zero, use_acc=False, is_async=True)
                b_s_b = warpgroup_mma_wait(1, deps=(b_t,))
            else:
                b_s_b = warpgroup_mma_wait(0, deps=(b_t,))
            barrier()
            _load_step(bulk_keys, key_row, i_step + STAGES, num_steps, ready.index(slot), buffers.keys.index(slot))
            flags_b.store(_excess(b_s_b, tile_b, key_step, BLOCKS), i_block, BLOCKS)
            key_step = next_key_step
        mbarrier.wait(ready.index(0), phase ^ 1, pred=i + STAGES < num_steps)


@gluon.jit
def _allocate_buffers(bulk_keys):
    """Allocate shared memory for two tiles and STAGES steps of keys, and the barriers that signal their arrival."""
    N: gl.constexpr = STEP_TOKENS
    BLOCK_D: gl.constexpr = bulk_keys.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, BLOCK_D], gl.float8e4nv)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [2, N, BLOCK_D], layout)
    keys = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, N, BLOCK_D], layout)
    ready = new_barriers(STAGES + 1, 1)
    fence_async_shared()
    barrier()
    return Buffers(queries, keys, ready)


@gluon.jit
def _load_first(bulk_queries, bulk_keys, query_row, key_row, num_steps, buffers):
    """Begin to copy both tiles, and the first steps of keys."""
    N: gl.constexpr = STEP_TOKENS
    queries_ready = buffers.ready.index(STAGES)
    mbarrier.expect(queries_ready, 2 * N * buffers.queries.shape[2])
    bulk_load(bulk_queries, [query_row, 0], queries_ready, buffers.queries.index(0))
    bulk_load(bulk_queries, [query_row + N, 0], queries_ready, buffers.queries.index(1))
    for i in gl.static_range(STAGES):
        _load_step(bulk_keys, key_row, i, num_steps, buffers.ready.index(i), buffers.keys.index(i))


@gluon.jit
def _load_step(bulk_keys, key_row, i_step, num_steps, ready, buffer):
    """Begin to copy a step of keys [128, BLOCK_D], one byte each; ``ready`` completes on arrival."""
    mbarrier.expect(ready, STEP_TOKENS * buffer.shape[1], pred=i_step < num_steps)
    bulk_load(bulk_keys, [key_row + i_step * STEP_TOKENS, 0], ready, buffer, pred=i_step < num_steps)


@gluon.jit
def _query_tiles(queries, first, stop_b):
    """Load thresholds and inverse scales of both tiles' queries.

    If there is no second tile, nothing passes its thresholds.
    """
    o_m = gl.arange(0, STEP_TOKENS, gl.SliceLayout(1, SCORES))
    o_q = first + o_m
    valid = o_m < gl.where(stop_b > 0, STEP_TOKENS, 0)
    b_threshold_a = gl.load(queries.thresholds + o_q)
    b_threshold_b = gl.load(queries.thresholds + o_q + STEP_TOKENS, mask=valid, other=float("inf"))
    b_inverse_a = gl.load(queries.inverse_scales + o_q).to(gl.float16)
    b_inverse_b = gl.load(queries.inverse_scales + o_q + STEP_TOKENS, mask=valid, other=0.0).to(gl.float16)
    return QueryTile(b_threshold_a, b_inverse_a), QueryTile(b_threshold_b, b_inverse_b)


@gluon.jit
def _key_steps(keys, i_selected, i_kv, first, zero):
    """Return pointers to the first step's key scales and biases.

    Scales have the layout of the largest scores, and biases that of the scores.
    """
    # The layout of the largest scores, inferred from a tile of zeros that is never computed.
    groups: gl.constexpr = gl.SliceLayout(0, _largest(zero).type.layout)
    o_scale = gl.arange(0, STEP_TOKENS // 32, gl.SliceLayout(1, groups))[:, None] * 4
    o_scale = o_scale + gl.arange(0, 4, gl.SliceLayout(0, groups))[None, :]
    scales = keys.scales + (i_kv.to(gl.int64) * keys.num_keys + first) // 8 + o_scale
    biases = keys.half_biases + i_selected.to(gl.int64) * keys.num_keys + first
    return KeySteps(biases + gl.arange(0, STEP_TOKENS, gl.SliceLayout(0, zero.type.layout)), scales)
