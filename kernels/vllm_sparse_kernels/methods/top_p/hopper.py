# SPDX-License-Identifier: Apache-2.0
"""Masses of blocks on Hopper: three launches for a run of tiles.

1. ``_diagonal_kernel`` handles each tile's diagonal keys, the only keys that need a mask. For each query it computes
   the reference of all its scores (``tops``), and the sum of exponentials over the blocks of these keys.
2. ``_scores_kernel``, in Gluon, handles all earlier keys: one maximum per query and block, one exponential, one byte. A
   producer loads keys. Each of two consumer groups holds the scores of 128 queries, those of two neighbouring tiles.
   The groups do not wait for each other. Two such programs fit a multiprocessor, so that the products of one group run
   while another processes its scores.
3. ``_masses_kernel`` converts bytes to numbers, divides them by each query's sum, averages them over the tile's
   queries, and tests whether one of them reaches the peak.

Keys are permuted within steps of 128 (``rounding.py``), so that all scores of a query and block are in one thread, and
a maximum takes one instruction for two scores. Products are summed in half precision, with an error of 2^-11 of a sum.

One thread of a group releases a step of keys for all four warps. Triton synchronises them between their wait for the
product and that arrival; a test checks this in the machine code (see ``attention.hopper.kernel.hopper_kernel``).

A byte has six bits of exponent and two of mantissa. It covers 2^-24 to 2^39 relative to the query's reference, which is
the largest score of the keys near the query and of the first 128 keys. Rounding changes a number by up to a ninth, and
the sum over a tile's queries averages these errors out. Bytes of [SCORED queries, 16 blocks] are stored together, query
by query. The 16 bytes of a query are in four words, by the block's place in its step: each thread of the matrix product
has one of them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.gluon_compat import (
    Channel,
    aggregate,
    barrier,
    bulk_load,
    bulk_steps,
    fence_async_shared,
    gl,
    gluon,
    larger_pairs,
    mbarrier,
    new_barriers,
    new_counter,
    tile_of,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from vllm_sparse_kernels.methods.top_p.choice import KEY_BLOCK, mass_bytes
from vllm_sparse_kernels.methods.top_p.rounding import Rounded
from vllm_sparse_kernels.methods.top_p.scored import GROUP_TILES, SCORED, SET_TILES, scored_offsets
from vllm_sparse_kernels.online_softmax import finite_maximum
from vllm_sparse_kernels.rows import TILE, ceil_div
from vllm_sparse_kernels.selection.lists import load_tile
from vllm_sparse_kernels.selection.slabs import SET_FIELDS, Run
from vllm_sparse_kernels.vectors import vector_pointers

STAGES = Constant(4)
"""Steps of keys in shared memory."""

MAX_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 80, Constant(104), Constant(24)
"""Registers per thread: at the start, so that two programs fit on an SM; then of consumers and of the producer's
group."""

STEP = Constant(128)
"""Keys of one step, which are multiplied and copied together."""

STEP_BLOCKS = Constant(STEP.value // KEY_BLOCK.value)

DIAGONAL_QUERIES = Constant(64)
"""Queries of a program of ``_diagonal_kernel``."""

ROUND = Constant(512)
"""Keys of a round of four steps: the 16 blocks whose bytes are stored together."""

SPAN = Constant(8192)
"""Keys of a program: enough to hide its start, and few enough to fill a card."""

PERMUTED = True
"""Whether keys are stored permuted within steps."""

LEAST_EXPONENT, EXPONENT_RANGE = Constant(-24.0), Constant(63.75)
"""Least exponent of a byte, and the range of exponents above it. The largest exponent rounds to the last byte,
1.75 · 2^39."""

UNIT = Constant(2.0**103)
"""Factor that turns a byte into an exponential. The byte becomes the middle bits of a float32: the lowest bits of the
exponent and the highest bits of the mantissa."""

BYTE_BITS = Constant(0x1FE00000)
"""The bits of that float32 that hold the byte: 21 to 28. Byte ``slot`` of a word of four moves there by a shift of
21 - 8 slot bits to the left, which is 3 bits to the right for the last byte."""

MASS_ROUNDS = Constant(32)
"""Rounds of one program of ``_masses_kernel``."""


class Scratch(NamedTuple):
    """Tensors that the launches of a run pass to each other."""

    tops: Any  # [num_selected, num_tiles, SCORED] float32, the reference of each query's scores
    diagonal: Any  # [num_selected, num_tiles, SCORED] float32, sums over the tile's own keys
    parts: Any  # [num_selected, num_tiles, num_spans, SCORED] float32, sums over the keys of spans
    bytes: Any  # [num_selected, num_tiles, num_rounds, SCORED, 4] int32


def tile_bytes(num_selected: int, reach: int) -> int:
    """Return the memory of one tile's scratch and masses."""
    rounds, spans = ceil_div(reach, ROUND.value), ceil_div(reach, SPAN.value)
    return num_selected * SCORED.value * (16 * rounds + 4 * spans + 8) + mass_bytes(num_selected, reach)


def compute_masses(call: Call, rounded: Rounded, run: Run, masses: torch.Tensor) -> None:
    """Do as ``portable.compute_masses``; the first of a tile's own blocks gets all of their mass, the others 0."""
    empty, tiles, method = call.index.workspace.empty, call.rows.tiles, call.method
    heads, group, first_tile = call.head_ids, call.group, run.first_tile
    num_selected, num_sets, num_tiles, scored = len(call.heads), len(run.tile_sets), run.num_tiles, SCORED.value
    num_rounds, num_spans = ceil_div(run.reach, ROUND.value), ceil_div(run.reach, SPAN.value)
    scratch = Scratch(
        empty(num_selected, num_tiles, scored),
        empty(num_selected, num_tiles, scored),
        empty(num_selected, num_tiles, num_spans, scored),
        empty(num_selected, num_tiles, num_rounds, scored, 4, dtype=torch.int32),
    )
    _diagonal_kernel[(num_sets, SET_TILES.value * scored // DIAGONAL_QUERIES.value, num_selected)](
        rounded, heads, tiles, first_tile, run.tile_sets, scratch, num_tiles,
        GROUP=group, KEPT_D=rounded.keys.shape[2], num_warps=4,
    )  # fmt: skip
    _scores_kernel[(num_sets, num_spans, num_selected)](
        rounded, bulk_steps(rounded.queries), bulk_steps(rounded.keys), heads, tiles, first_tile,
        run.tile_sets, scratch, num_tiles, num_spans, num_rounds,
        GROUP=group, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    _masses_kernel[(ceil_div(num_rounds, MASS_ROUNDS.value), num_tiles, num_selected)](
        method.least_peak, tiles, first_tile, scratch, num_tiles, num_spans, num_rounds, masses,
        *masses.stride()[:2], num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_tile", "num_tiles"])
def _diagonal_kernel(
    rounded, heads, tiles, first_tile, tile_sets, scratch, num_tiles,
    GROUP: tl.constexpr, KEPT_D: tl.constexpr,
):  # fmt: skip
    """Score queries of a tile of one head with the keys of the step that contains its first query, and of later steps.

    Grid: (tile sets, parts of their tiles, selected heads), 4 warps. The arguments are those of ``_scores_kernel``.
    Writes ``scratch.tops`` and ``scratch.diagonal``. It takes little time compared with that kernel: a few steps, with
    masks.
    """
    TILE_PROGRAMS: tl.constexpr = SCORED // DIAGONAL_QUERIES  # programs of a tile
    i_selected = tl.program_id(2)
    tile_set = tile_sets + tl.program_id(0) * SET_FIELDS
    i_tile = tl.load(tile_set) + tl.program_id(1) // TILE_PROGRAMS
    if tl.program_id(1) // TILE_PROGRAMS < tl.load(tile_set + 1):
        _, _, length, position = load_tile(tiles, i_tile)
        o_m = tl.program_id(1) % TILE_PROGRAMS * DIAGONAL_QUERIES + tl.arange(0, DIAGONAL_QUERIES)
        o_query = position + scored_offsets(o_m, length)
        o_q = i_selected.to(tl.int64) * rounded.num_queries + i_tile * SCORED + o_m
        b_q = tl.load(vector_pointers(rounded.queries, o_q, KEPT_D))
        b_query_scale = tl.load(rounded.query_scales + o_q)
        first_key = (tl.load(heads + i_selected) // GROUP).to(tl.int64) * rounded.num_keys + tl.load(tile_set + 2)
        first_own_step = position // STEP
        num_own_steps = (position + length - 1) // STEP - first_own_step + 1
        b_top = tl.full([DIAGONAL_QUERIES], float("-inf"), tl.float32)
        b_sum = tl.zeros([DIAGONAL_QUERIES], tl.float32)
        # The first step and the step before the tile's own steps count for the reference only, and the tile's own steps
        # also for the sum.
        for i in range(tl.where(first_own_step == 0, 2, 0), num_own_steps + 2):
            i_step = tl.where(i == 0, 0, first_own_step + i - 2)
            first = i_step * STEP
            b_u = _step_maxima(rounded, first_key + first, b_q, b_query_scale, o_query - first, KEPT_D)
            b_new = tl.maximum(b_top, tl.max(b_u, 1))
            b_finite = finite_maximum(b_new)
            b_sum = b_sum * tl.exp2(b_top - b_finite)
            if i >= 2:
                b_sum += tl.sum(tl.exp2(b_u - b_finite[:, None]), 1)
            b_top = b_new
        o_top = (i_selected * num_tiles + i_tile - first_tile) * SCORED + o_m
        tl.store(scratch.tops + o_top, b_top)
        tl.store(scratch.diagonal + o_top, b_sum)


@triton.jit
def _step_maxima(rounded, first, b_q, b_query_scale, b_last, KEPT_D: tl.constexpr):
    """Compute the largest score of each query and block of the step that begins at key ``first``: [queries, 4].

    ``b_last``: each query's last key, counted from ``first``.
    """
    o_n = tl.arange(0, STEP)
    b_k = tl.load(vector_pointers(rounded.keys, first + o_n, KEPT_D))
    b_key_scale = tl.load(rounded.key_scales + first // KEY_BLOCK + tl.arange(0, STEP_BLOCKS))
    b_s = tl.dot(b_q, tl.trans(b_k))
    o_key = o_n // 2 % STEP_BLOCKS * KEY_BLOCK + o_n // 8 * 2 + o_n % 2  # the key in each slot of the permuted step
    b_s = tl.where(o_key[None, :] <= b_last[:, None], b_s, float("-inf"))
    b_s = tl.max(tl.max(tl.reshape(b_s, [b_q.shape[0], KEY_BLOCK // 2, STEP_BLOCKS, 2]), 3), 1)
    # Scales are 0 past the row's end, and 0 times minus infinity would be NaN.
    return tl.where(b_s == float("-inf"), b_s, b_s * (b_query_scale[:, None] * b_key_scale[None, :]))


@gluon.jit
def _largest_of_three(b_a, b_b, b_c):
    """Return the maximum of three values, which assembles to one instruction."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 m; max.f16x2 m, $1, $2; max.f16x2 $0, m, $3;}", "=r,r,r,r", [b_a, b_b, b_c], gl.float16,
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _block_maxima(b_s):
    """Compute the largest score of each block, [queries, 4] float32. One thread holds all 16 pairs of a block.

    Column 8 a + 2 t + e of ``b_s`` [queries, 128] is key 2 a + e of block t. The axes become (query, t, e, four bits of
    a). Splits separate the 16 values of a, which are registers of the thread. An instruction handles both values of e.
    """
    b_s = b_s.reshape([b_s.shape[0], 2, 2, 2, 2, 4, 2]).permute((0, 5, 6, 1, 2, 3, 4))
    b_a, b_b = b_s.split()
    b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = _eighths(b_a)
    b_8, b_9, b_10, b_11, b_12, b_13, b_14, b_15 = _eighths(b_b)
    b_low = _largest_of_three(_largest_of_three(b_0, b_1, b_2), b_3, b_4)
    b_middle = _largest_of_three(_largest_of_three(b_5, b_6, b_7), b_8, b_9)
    b_high = _largest_of_three(_largest_of_three(b_10, b_11, b_12), b_13, b_14)
    b_even, b_odd = larger_pairs(_largest_of_three(b_low, b_middle, b_high), b_15).split()
    return gl.maximum(b_even, b_odd).to(gl.float32)


@gluon.jit
def _eighths(b_x):
    """Split the last three axes, of two elements each, into eight tensors."""
    b_a, b_b = b_x.split()
    b_aa, b_ab = b_a.split()
    b_ba, b_bb = b_b.split()
    b_0, b_1 = b_aa.split()
    b_2, b_3 = b_ab.split()
    b_4, b_5 = b_ba.split()
    b_6, b_7 = b_bb.split()
    return b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7


@aggregate
class Shared:
    """Shared memory of ``_scores_kernel``."""

    q_tiles: gl.shared_memory_descriptor  # [2, TILE, KEPT_D] e4m3
    q_full: gl.shared_memory_descriptor  # a barrier
    keys: Channel  # [STAGES, STEP, KEPT_D] e4m3


@aggregate
class TileSet:
    """Work of one program of ``_scores_kernel``: up to two groups of tiles of one head, and one span of keys."""

    first_query: gl.tensor  # number of the first tile's first scored query among the queries of all heads
    first_key: gl.tensor  # number of the span's first key among the keys of all heads
    i_head_tile: gl.tensor  # number of the first (head, tile) in the launch
    i_span: gl.tensor
    num_tiles: gl.tensor  # 1 to 4


@aggregate
class ScoreTensors:
    """Tensors that the consumers of ``_scores_kernel`` read and write."""

    rounded: gl.tuple  # Rounded
    scratch: gl.tuple  # Scratch
    num_spans: gl.tensor
    num_rounds: gl.tensor


@gluon.jit(do_not_specialize=["first_tile", "num_tiles", "num_spans", "num_rounds"])
def _scores_kernel(
    rounded, bulk_queries, bulk_keys, heads, tiles, first_tile, tile_sets, scratch, num_tiles, num_spans,
    num_rounds, GROUP: gl.constexpr,
):  # fmt: skip
    """Score a set of tiles of one head with one span of keys: 128 queries per consumer group.

    A group has the scored queries of two neighbouring tiles. The keys are in the causal
    reach of all queries of a tile; the second tile of a group has one more step than the first.

    Grid: (tile sets, spans, selected heads), with 4 warps in each of the two consumer groups and one producer warp.
    Two programs fit on an SM. Bound by the instructions that process scores: maxima of half-precision pairs.

    Args:
        rounded: ``Rounded``: queries [num_selected, num_queries, KEPT_D] and keys [num_kv_heads, num_keys, KEPT_D],
            both e4m3, and the scales of their products.
        heads: [num_selected] int32.
        tile_sets: [num_sets, SET_FIELDS] int32: first tile, tiles, and where the row's keys begin in the slab.
    """
    i_span, i_selected = gl.program_id(1), gl.program_id(2)
    tile_set = tile_sets + gl.program_id(0) * SET_FIELDS
    i_tile = gl.load(tile_set)
    num_set_tiles = gl.load(tile_set + 1)
    first_step = i_span * (SPAN // STEP)
    # A group that has no tile takes the set's last one, and stores nothing.
    steps_a = _steps_of(tiles, i_tile, gl.minimum(GROUP_TILES, num_set_tiles) - 1, first_step)
    steps_b = _steps_of(tiles, i_tile, num_set_tiles - 1, first_step)
    first_steps_a = _steps_of(tiles, i_tile, 0, first_step)
    first_steps_b = _steps_of(tiles, i_tile, gl.minimum(GROUP_TILES, num_set_tiles - 1), first_step)
    first_key = gl.load(heads + i_selected) // GROUP * rounded.num_keys + gl.load(tile_set + 2) + first_step * STEP
    first_query = i_selected * rounded.num_queries + i_tile * SCORED

    KEPT_D: gl.constexpr = bulk_keys.block_type.shape[1]
    q_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2, TILE, KEPT_D], bulk_queries.layout)
    k_steps = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, STEP, KEPT_D], bulk_keys.layout)
    q_full = new_barriers(1, 1)
    full = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 2)
    fence_async_shared()
    barrier()
    i_head_tile = i_selected * num_tiles + i_tile - first_tile
    shared = Shared(q_tiles, q_full, Channel(k_steps, full, empty))
    tensors = ScoreTensors(rounded, scratch, num_spans, num_rounds)
    work = TileSet(first_query, first_key, i_head_tile, i_span, num_set_tiles)
    gl.warp_specialize(
        [
            (_consume, (shared, tensors, work, first_steps_a, steps_a, 0)),
            (_consume, (shared, tensors, work, first_steps_b, steps_b, 1)),
            (_produce, (shared, bulk_queries, bulk_keys, first_query, first_key, steps_b)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _steps_of(tiles, i_tile, i_member, first_step):
    """Return the steps of a program that lie before the first query of tile ``i_member`` of a set."""
    return gl.minimum(tile_of(tiles, i_tile + i_member).position() // STEP - first_step, SPAN // STEP)


@gluon.jit
def _produce(shared, bulk_queries, bulk_keys, first_query, first_key, num_steps):
    """Load the queries of both groups, then the span's keys. The last tile reaches at least as many keys as others."""
    q_tiles, keys = shared.q_tiles, shared.keys
    q_full = shared.q_full.index(0)
    mbarrier.expect(q_full, 2 * TILE * q_tiles.shape[2])
    bulk_load(bulk_queries, [first_query.to(gl.int32), 0], q_full, q_tiles.index(0))
    bulk_load(bulk_queries, [(first_query + TILE).to(gl.int32), 0], q_full, q_tiles.index(1))
    for i in range(num_steps):
        step = new_counter(STAGES).plus(i)
        keys.acquire_empty(step)
        full = keys.full_barrier(step)
        mbarrier.expect(full, STEP * keys.buffers.shape[2])
        bulk_load(bulk_keys, [(first_key + i * STEP).to(gl.int32), 0], full, keys.buffer(step))


@gluon.jit
def _consume(shared, tensors, work, first_steps, num_steps, CONSUMER: gl.constexpr):
    """Score the tiles of consumer group CONSUMER, 0 or 1. If they do not exist, keys are scored and nothing is stored.

    ``first_steps`` are the steps of the group's first tile, and ``num_steps`` those of its last tile, at most one more.
    The first tile's bytes of that additional step are never read.
    """
    keys = shared.keys
    rounded, scratch = tensors.rounded, tensors.scratch
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 32])
    zero = gl.zeros([TILE, STEP], gl.float16, mma)
    # The layout of the maxima, inferred from a tile of zeros that is never computed.
    layout: gl.constexpr = _block_maxima(zero).type.layout
    o_m = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    o_t = gl.arange(0, STEP_BLOCKS, gl.SliceLayout(0, layout))
    valid = o_m < (work.num_tiles - CONSUMER * GROUP_TILES) * SCORED
    i_head_tile = work.i_head_tile + CONSUMER * GROUP_TILES
    o_tile, o_query = o_m // SCORED, o_m % SCORED
    b_query_scale = gl.load(rounded.query_scales + work.first_query + CONSUMER * TILE + o_m, valid, 0.0)
    b_top = gl.load(scratch.tops + i_head_tile * SCORED + o_m, valid, 0.0)
    b_query_scale, b_shift = b_query_scale / EXPONENT_RANGE, (-LEAST_EXPONENT - b_top) / EXPONENT_RANGE
    b_sum = gl.zeros([TILE, STEP_BLOCKS], gl.float32, layout)
    b_word = gl.zeros([TILE, STEP_BLOCKS], gl.int32, layout)
    # The sum without the last step. A separate tensor: Triton would not carry a second name of the first sum on from
    # step to step.
    b_previous = gl.zeros([TILE, STEP_BLOCKS], gl.float32, layout)
    i_round = i_head_tile.to(gl.int64) * tensors.num_rounds + work.i_span * (SPAN // ROUND)
    words = scratch.bytes + i_round * (SCORED * 4)
    words = words + ((o_tile * (tensors.num_rounds * SCORED) + o_query)[:, None] * 4 + o_t[None, :])
    key_scales = rounded.key_scales + work.first_key // KEY_BLOCK + o_t
    b_key_scale = gl.load(key_scales, mask=o_t < num_steps * STEP_BLOCKS, other=0.0)  # a short row ends before the span
    mbarrier.wait(shared.q_full.index(0), 0)
    for i in range(num_steps):
        step = new_counter(STAGES).plus(i)
        keys.acquire_full(step)
        b_k = keys.buffer(step).permute((1, 0))
        token = warpgroup_mma(shared.q_tiles.index(CONSUMER), b_k, zero, use_acc=False, is_async=True)
        b_next_scale = gl.load(key_scales + gl.minimum(i + 1, num_steps - 1) * STEP_BLOCKS)
        b_s = warpgroup_mma_wait(0, deps=(token,))
        keys.release(step)
        # Saturating between 0 and 1 clamps the exponent, also for a product that is not finite.
        b_share = _saturated(_block_maxima(b_s), b_query_scale[:, None] * b_key_scale[None, :], b_shift[:, None])
        b_x = gl.exp2(b_share * EXPONENT_RANGE + LEAST_EXPONENT)
        b_previous = b_sum
        b_sum += b_x
        b_word = _append_byte(b_word, b_x)
        if (i % 4 == 3) | (i + 1 == num_steps):
            gl.store(words + i // 4 * (SCORED * 4), b_word >> (24 - i % 4 * 8), mask=valid[:, None])
        b_key_scale = b_next_scale
    b_sum = gl.where((o_tile == 0)[:, None] & (first_steps < num_steps), b_previous, b_sum)
    part = scratch.parts + (i_head_tile * tensors.num_spans + work.i_span) * SCORED
    part += o_tile * (tensors.num_spans * SCORED) + o_query
    gl.store(part, gl.sum(b_sum, 1), mask=valid & (o_m < num_steps * STEP))


@gluon.jit
def _saturated(b_a, b_b, b_c):
    """Return a · b + c, clamped to [0, 1], by a single instruction; 0 for NaN."""
    b_a, b_b = gl.broadcast(b_a, b_b)
    b_a, b_c = gl.broadcast(b_a, b_c)
    return gl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;", "=r,r,r,r", [b_a, b_b, b_c], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _append_byte(b_word, b_x):
    """Shift words down by a byte and fill the highest byte.

    The new byte has six bits of exponent and two of mantissa, rounded to nearest.
    """
    b_bits = (b_x.to(gl.int32, bitcast=True) << 3) + 1686110208  # (bits + 2^20 - 103 · 2^23) · 8
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7321;", "=r,r,r", [b_word, b_bits], gl.int32, is_pure=True, pack=1
    )


@gluon.jit(do_not_specialize=["first_tile", "num_tiles", "num_spans", "num_rounds", "stride_head", "stride_tile"])
def _masses_kernel(
    peak, tiles, first_tile, scratch, num_tiles, num_spans, num_rounds, target, stride_head, stride_tile,
):  # fmt: skip
    """Convert up to MASS_ROUNDS rounds of one tile and head to masses.

    A warp handles one round, and a thread an eighth of its queries.

    Grid: (parts of MASS_ROUNDS rounds, tiles, selected heads), 4 warps. Bound by reading ``scratch.bytes``, a byte for
    each query and block. The previous launch has left a part of it in the L2 cache.

    Args:
        target: [num_selected, num_tiles, width] float32.
        stride_head: Elements between two heads of ``target``.
        stride_tile: Elements between two tiles of ``target``.
    """
    i_run_tile = gl.program_id(1)
    i_selected = gl.num_programs(2) - 1 - gl.program_id(2)  # the bytes that were written last are still in the cache
    tile = tile_of(tiles, first_tile + i_run_tile)
    length, position = tile.length(), tile.position()
    scored = (length + 1) // 2
    num_blocks = position // STEP * STEP_BLOCKS  # before the tile's own keys
    begin = gl.program_id(0) * MASS_ROUNDS
    end = gl.minimum(begin + MASS_ROUNDS, gl.cdiv(num_blocks, 16))
    if (begin == 0) | (begin < end):
        WARPS: gl.constexpr = gl.num_warps()
        layout: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
        per_query: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
        per_block: gl.constexpr = gl.SliceLayout(1, layout)
        i_head_tile = i_selected * num_tiles + i_run_tile
        line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        o_m = gl.arange(0, SCORED, line)
        b_diagonal = gl.load(scratch.diagonal + i_head_tile * SCORED + o_m)
        spans = gl.cdiv(position // STEP * STEP, SPAN)
        b_weight = _weights(scratch, num_spans, i_head_tile, b_diagonal, spans, scored, o_m)
        tile_masses = target + i_selected.to(gl.int64) * stride_head + i_run_tile * stride_tile
        if begin == 0:  # this program also stores the mass of the tile's own keys
            mass = gl.sum(gl.where(o_m < scored, b_diagonal, 0.0) * b_weight, 0)
            num_diagonal = (position + length - 1) // KEY_BLOCK + 1 - num_blocks
            gl.store(tile_masses + num_blocks + o_m, gl.where(o_m == 0, mass, 0.0), mask=o_m < num_diagonal)
        b_weight = gl.convert_layout(b_weight * UNIT, per_query)
        o_r = gl.arange(0, WARPS, gl.SliceLayout(1, per_block))
        o_t = gl.arange(0, 4, gl.SliceLayout(0, per_block))
        o_b = o_r[:, None] * 16 + o_t[None, :]
        o_round = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
        o_word = gl.arange(0, SCORED, per_query)[None, :, None] * 4
        o_word = o_word + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
        words = scratch.bytes + i_head_tile.to(gl.int64) * num_rounds * (SCORED * 4) + o_word
        b_next = gl.load(words + gl.minimum(begin + o_round, gl.maximum(end - 1, 0)) * (SCORED * 4))
        for i in range(begin, end, WARPS):
            b_word = b_next
            b_next = gl.load(words + gl.minimum(i + WARPS + o_round, end - 1) * (SCORED * 4))
            for slot in gl.static_range(4):
                # The byte is placed at a float's lowest exponents, so the result is multiplied by ``UNIT``.
                b_bits = (b_word << (21 - 8 * slot)) if slot < 3 else (b_word >> 3)
                b_x = (b_bits & BYTE_BITS).to(gl.float32, bitcast=True)
                b_x = b_x * b_weight[None, :, None]
                b_mass = gl.sum(b_x, 1)
                b_mass = gl.where(gl.max(b_x, 1) * scored.to(gl.float32) >= peak, -b_mass, b_mass)
                o_block = i * 16 + slot * 4 + o_b
                gl.store(tile_masses + o_block, b_mass, mask=o_block < num_blocks)


@gluon.jit
def _weights(scratch, num_spans, i_head_tile, b_diagonal, spans, scored, o_m):
    """Return the factor of a query's exponentials in the tile's mean: 1 / (its sum · number of scored queries)."""
    b_sum = b_diagonal
    parts = scratch.parts + i_head_tile * num_spans * SCORED + o_m
    for i in range(0, spans, 8):
        for j in gl.static_range(8):  # eight loads in flight
            b_sum += gl.load(parts + (i + j) * SCORED, mask=o_m < (spans - i - j) * SCORED, other=0.0)
    return gl.where(o_m < scored, 1.0 / (b_sum * scored.to(gl.float32)), 0.0)
