# SPDX-License-Identifier: Apache-2.0
"""The kernels of the engine ``portable``: places of blocks in the cache, and attention of one (query head, tile).

Options are known at compile time: an argument that is None leaves no code in the kernel.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.attention.smooth_keys import SCALE_TOKENS, quantize
from vllm_sparse_kernels.compile_time import LN_2, LOG2_E, Constant
from vllm_sparse_kernels.paged import key_offsets, widen
from vllm_sparse_kernels.selection.lists import load_tile

KEYS = Constant(0)
VALUES = Constant(1)

UNREACHED = Constant(1e30)
"""Running maximum of rows past the tile's last query, so high that these rows never prevent a skip."""


class AttendShape(NamedTuple):
    """Compile-time sizes of ``attend_kernel``; every field is a ``tl.constexpr``."""

    HEAD_DIM: Any
    BLOCK_D: Any  # HEAD_DIM rounded up to a power of two
    NUM_HEADS: Any  # query heads
    GROUP: Any  # query heads of a kv head
    BLOCK_M: Any  # queries of a program
    PARTS: Any  # programs that divide the queries of a tile
    BLOCK_N: Any  # keys of a block
    STRIPES: Any  # stripes of a step; 0: the index has none
    PRECISION: Any  # ``input_precision`` of ``tl.dot`` for float32
    AHEAD: Any  # whole steps that are loaded ahead; 0 to let the compiler load keys and values separately


class TileLists(NamedTuple):
    """The lists of one tile and head, and their places in the index."""

    blocks: Any  # pointer to the ids of its blocks, or to their places
    num_full: Any  # blocks before the tile's diagonal, which need no mask
    num_blocks: Any  # blocks up to the last query of the program
    tile_first: Any  # position of the tile's first query
    program_first: Any  # position of the program's first query
    index: Any  # IndexArgs
    i_head: Any
    i_tile: Any
    num_tiles: Any


class KeyValueSource(NamedTuple):
    """The keys and values of one row and kv head."""

    cache: Any  # KeyArgs with values
    k_matrix: Any  # descriptor of the keys for bulk copies, or None
    v_matrix: Any
    matrix: Any  # MatrixArgs; None if blocks have no places
    table: Any  # pointer to the row's pages
    i_kv: Any
    tile_end: Any  # position after the tile's last query
    smooth_matrix: Any  # descriptor of the 8-bit keys for bulk copies, or None


class Int8Keys(NamedTuple):
    """The 8-bit keys of one row and kv head."""

    block_ids: Any  # pointer to the ids of the tile's blocks
    integers: Any  # as in SmoothKeys
    scales: Any
    first_key: Any  # number of the row's first key in ``integers``
    query_scale: Any  # scale of the queries' integers, times the softmax's scale


class Softmax(NamedTuple):
    """The online softmax of a tile, in base 2."""

    b_acc: Any  # [BLOCK_M, BLOCK_D] float32, Σ 2^(S − max) V
    b_max: Any  # [BLOCK_M] float32, largest scaled score
    b_sum: Any  # [BLOCK_M] float32, Σ 2^(S − max)


@triton.jit
def place_blocks_kernel(
    index, block_table, stride_table, places, page_size, rows_per_page,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Write the places of the blocks of one (query head, tile) in the cache viewed as a matrix of tokens.

    The place of block j of a row is block_table[row, BLOCK_N j // page_size] · rows_per_page + BLOCK_N j mod page_size.
    Grid: (tiles, query heads). Bound by the latency of its dependent loads; it moves a few bytes per block.

    Args:
        block_table: [num_rows, max_pages] int32.
        stride_table: Elements between two rows of ``block_table``.
    """
    i_tile, i_head = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(index.tiles + i_tile * FIELDS).to(tl.int64)
    start = i_head.to(tl.int64) * index.stride_blocks + tl.load(index.block_offsets + i_tile)
    count = tl.load(index.block_counts + i_head * tl.num_programs(0) + i_tile)
    for first in range(0, count, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        position = tl.load(index.block_ids + start + o_n, mask=o_n < count, other=0) * BLOCK_N
        page = tl.load(block_table + i_row * stride_table + position // page_size, mask=o_n < count, other=0)
        tl.store(places + start + o_n, page * rows_per_page + position % page_size, mask=o_n < count)


@triton.jit
def attend_kernel(
    queries, cache, k_matrix, v_matrix, matrix, index, scale, value_scale, skip_margins, int8_heads,
    smooth, smooth_matrix, SHAPE,
):  # fmt: skip
    """Compute O = softmax(scale · Q Kᵀ) V of one (query head, tile), over the index's keys up to each query's position.

    If the GPU cannot hold all queries of a tile in one program, each of PARTS programs processes BLOCK_M of them.

    Online softmax in float32 and base 2. For each step, S = scale log₂e · Q Kᵀ, m' = max(m, max S),
    l' = 2^(m − m') l + Σ 2^(S − m'), O' = 2^(m − m') O + 2^(S − m') V; at the end O / l, where a sink adds
    2^(sink log₂e − m) to l.

    Grid: (tiles · query heads · PARTS), ordered by kv head, then by tile with the longest first, then by head of the
    group, then by part.
    Bound by the matrix units, by exponentials at head_dim 64, and by the gather for stripes.

    Args:
        queries: ``AttendArgs``; q and out [tokens, NUM_HEADS, HEAD_DIM] in 16 bits, lse [NUM_HEADS, tokens] float32 in
            natural units.
        cache: ``KeyArgs`` with values, pages of [page_size, kv heads, HEAD_DIM].
        k_matrix: Descriptor of the keys as a matrix of tokens, with boxes of [BLOCK_N, HEAD_DIM]; or None.
        skip_margins: [NUM_HEADS] float32, SpargeAttn's λ in natural units; None to skip nothing.
        int8_heads: [NUM_HEADS] uint8, 1 for heads with 8-bit scores. If it is None and ``smooth`` is not, all heads
            have them.
        smooth_matrix: Descriptor of the 8-bit keys with boxes of [BLOCK_N, BLOCK_D]; or None.
    """
    # Order of programs: kv head, then tile with the longest first, then head of the group, then part.
    i_program = tl.program_id(0) // SHAPE.PARTS
    part_start = tl.program_id(0) % SHAPE.PARTS * SHAPE.BLOCK_M  # the program's first query in the tile
    num_tiles = tl.num_programs(0) // (SHAPE.NUM_HEADS * SHAPE.PARTS)
    i_kv = i_program // (num_tiles * SHAPE.GROUP)
    i_tile = tl.load(index.order + i_program % (num_tiles * SHAPE.GROUP) // SHAPE.GROUP)
    i_head = i_kv * SHAPE.GROUP + i_program % SHAPE.GROUP

    i_row, token, tile_length, tile_first = load_tile(index.tiles, i_tile)
    tile_end = tile_first + tile_length
    program_first = tile_first + part_start
    length = tl.minimum(tile_length - part_start, SHAPE.BLOCK_M)  # not positive for parts past the tile's last query
    o_m = tl.arange(0, SHAPE.BLOCK_M)
    o_d = tl.arange(0, SHAPE.BLOCK_D)
    o_q = (token + part_start + o_m).to(tl.int64)
    in_tile = o_m < length
    in_head = in_tile[:, None] & (o_d < SHAPE.HEAD_DIM)[None, :]
    b_q = tl.load(
        queries.q + o_q[:, None] * queries.stride_token + i_head * queries.stride_head + o_d[None, :],
        mask=in_head, other=0.0,
    )  # fmt: skip
    table = cache.block_table + i_row.to(tl.int64) * cache.stride_table

    b_max = tl.full([SHAPE.BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([SHAPE.BLOCK_M], tl.float32)
    b_acc = tl.zeros([SHAPE.BLOCK_M, SHAPE.BLOCK_D], tl.float32)
    margin = None
    if skip_margins is not None:
        margin = tl.load(skip_margins + i_head) * LOG2_E
        b_max = tl.where(in_tile, b_max, UNREACHED)
        b_sum = tl.where(in_tile, b_sum, 1.0)

    # Blocks before the diagonal need no mask; diagonal blocks are always listed, and come last.
    blocks = index.block_ids + i_head.to(tl.int64) * index.stride_blocks + tl.load(index.block_offsets + i_tile)
    num_blocks = tl.load(index.block_counts + i_head * num_tiles + i_tile)
    last_block = (tile_end - 1) // SHAPE.BLOCK_N
    num_full = num_blocks - (last_block - tile_first // SHAPE.BLOCK_N + 1)
    if SHAPE.PARTS > 1:
        num_blocks -= last_block - (program_first + length - 1) // SHAPE.BLOCK_N
        num_full = tl.where(length > 0, num_full, 0)
        num_blocks = tl.where(length > 0, num_blocks, 0)
    lists = TileLists(blocks, num_full, num_blocks, tile_first, program_first, index, i_head, i_tile, num_tiles)
    source = KeyValueSource(cache, k_matrix, v_matrix, matrix, table, i_kv, tile_end, smooth_matrix)
    softmax = Softmax(b_acc, b_max, b_sum)
    softmax = _walk_by_head(b_q, smooth, int8_heads, i_row, lists, source, scale, margin, softmax, SHAPE)

    b_total = softmax.b_sum
    if queries.sinks is not None:
        b_total += tl.exp2(tl.load(queries.sinks + i_head).to(tl.float32) * LOG2_E - softmax.b_max)
    b_out = (softmax.b_acc / b_total[:, None] * value_scale).to(queries.out.dtype.element_ty)
    o_out = o_q[:, None] * queries.stride_out_token + i_head * queries.stride_out_head + o_d[None, :]
    tl.store(queries.out + o_out, b_out, mask=in_head)
    if queries.lse is not None:
        b_lse = (softmax.b_max + tl.log2(softmax.b_sum)) * LN_2
        tl.store(queries.lse + i_head.to(tl.int64) * queries.stride_lse_head + o_q, b_lse, mask=in_tile)


@triton.jit
def _walk_by_head(b_q, smooth, int8_heads, i_row, lists, source, scale, margin, softmax, SHAPE):
    """Run ``_walk`` with the head's kind of scores. If all heads use the same kind, only this kind is compiled."""
    if smooth is None:
        softmax = _walk(b_q, None, lists, source, scale, margin, softmax, SHAPE)
    else:
        in_8_bits = True
        if int8_heads is not None:
            in_8_bits = tl.load(int8_heads + lists.i_head) != 0
        if in_8_bits:
            softmax = _walk_int8(b_q, smooth, i_row, lists, source, scale, margin, softmax, SHAPE)
        else:
            softmax = _walk(b_q, None, lists, source, scale, margin, softmax, SHAPE)
    return softmax


@triton.jit
def _walk(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE):
    """Process all keys that the tile keeps. ``int8_keys`` replaces the keys if b_q is 8-bit; otherwise None."""
    softmax = _walk_full(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE)
    softmax = _walk_diagonal(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE)
    if SHAPE.STRIPES > 0:
        softmax = _walk_stripes(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE)
    return softmax


@triton.jit
def _walk_int8(b_q, smooth, i_row, lists, source, scale, margin, softmax, SHAPE):
    """Run ``_walk`` with 8-bit scores. The returned maximum includes the shift that smoothing removed from scores."""
    index = lists.index
    o_mean = i_row * smooth.stride_means + source.i_kv * SHAPE.BLOCK_D + tl.arange(0, SHAPE.BLOCK_D)
    b_mean = tl.load(smooth.means + o_mean)
    b_shift = tl.sum(b_q.to(tl.float32) * b_mean[None, :], 1) * scale
    b_int, query_scale = quantize(b_q.to(tl.float32))
    first_key = source.i_kv * smooth.num_keys + tl.load(smooth.starts + i_row)
    block_ids = smooth.block_ids + lists.i_head.to(tl.int64) * index.stride_blocks
    block_ids += tl.load(index.block_offsets + lists.i_tile)
    int8_keys = Int8Keys(block_ids, smooth.integers, smooth.scales, first_key, query_scale * scale)
    softmax = _walk(b_int, int8_keys, lists, source, 1.0, margin, softmax, SHAPE)
    return Softmax(softmax.b_acc, softmax.b_max + b_shift, softmax.b_sum)


@triton.jit
def _walk_full(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE):
    """Process the blocks that lie before all queries of the tile.

    No address depends on a value that an iteration carries to the next, because Triton does not pipeline such loads.

    Triton pipelines the loads of products at the loop's top level, or all loads if there is no such product. The step
    is therefore in a branch whose condition is always true but unknown to the compiler, and all of its data are loaded
    AHEAD buffers before. With a margin, the values' product is in a branch anyway, and nothing else would load values
    ahead. Without AHEAD there is no margin: see ``engine._buffers_ahead``.
    """
    for i in tl.range(0, lists.num_full, num_stages=SHAPE.AHEAD if SHAPE.AHEAD > 0 else None):
        entry = tl.load(lists.blocks + i)
        b_k, b_dot_scale = _load_keys(int8_keys, i, entry, source, SHAPE)
        if SHAPE.AHEAD > 0:
            b_v = _load_block(VALUES, entry, source, SHAPE)
            if lists.num_full > 0:
                b_s = _score(b_q, b_k, b_dot_scale, int8_keys, SHAPE.PRECISION)
                softmax = _softmax_step(b_s, b_v, scale, margin, softmax, SHAPE.PRECISION)
        else:
            b_s = _score(b_q, b_k, b_dot_scale, int8_keys, SHAPE.PRECISION)
            b_v = _load_block(VALUES, entry, source, SHAPE)
            softmax = _softmax_step(b_s, b_v, scale, None, softmax, SHAPE.PRECISION)
    return softmax


@triton.jit
def _walk_diagonal(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE):
    """Process the diagonal blocks, with the causal mask. The first one has a key for each of the program's queries."""
    first_block = lists.tile_first // SHAPE.BLOCK_N
    o_m = lists.program_first + tl.arange(0, SHAPE.BLOCK_M)
    for i in range(lists.num_full, lists.num_blocks):
        entry = tl.load(lists.blocks + i)
        o_n = (first_block + i - lists.num_full) * SHAPE.BLOCK_N + tl.arange(0, SHAPE.BLOCK_N)
        b_k, b_dot_scale = _load_keys(int8_keys, i, entry, source, SHAPE)
        b_s = _score(b_q, b_k, b_dot_scale, int8_keys, SHAPE.PRECISION)
        b_s = tl.where(o_n[None, :] <= o_m[:, None], b_s, float("-inf"))
        # Past the sequence's end the cache may hold NaN, and 0 · NaN is NaN.
        b_v = _load_block(VALUES, entry, source, SHAPE)
        b_v = tl.where((o_n < source.tile_end)[:, None], b_v, 0.0)
        softmax = _softmax_step(b_s, b_v, scale, margin, softmax, SHAPE.PRECISION)
    return softmax


@triton.jit
def _walk_stripes(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE):
    """Process the stripes, a step at a time; all lie before the tile's first query."""
    index, cache = lists.index, source.cache
    o_list = lists.i_head * lists.num_tiles
    stripes = index.stripe_positions + tl.load(index.stripe_offsets + o_list + lists.i_tile)
    num_stripes = tl.load(index.stripe_counts + o_list + lists.i_tile)
    o_d = tl.arange(0, SHAPE.BLOCK_D)
    for i in range(0, num_stripes, SHAPE.STRIPES):
        o_n = i + tl.arange(0, SHAPE.STRIPES)
        kept = o_n < num_stripes
        b_n = tl.load(stripes + o_n, mask=kept, other=0)
        o_key = key_offsets(source.table, b_n, kept, cache.page_size, cache.stride_page, cache.stride_token)
        o_kv = source.i_kv.to(tl.int64) * cache.stride_head + o_key[:, None] + o_d[None, :]
        in_kv = kept[:, None] & (o_d < SHAPE.HEAD_DIM)[None, :]
        if int8_keys is None:
            b_k = tl.load(cache.k + o_kv, mask=in_kv, other=0.0)
            b_dot_scale = 1.0
        else:
            o_int = (int8_keys.first_key + b_n).to(tl.int64)[:, None] * SHAPE.BLOCK_D + o_d[None, :]
            b_k = tl.load(int8_keys.integers + o_int)
            b_dot_scale = (
                tl.load(int8_keys.scales + (int8_keys.first_key + b_n) // SCALE_TOKENS) * int8_keys.query_scale
            )
        b_v = tl.load(cache.v + o_kv, mask=in_kv, other=0.0)
        b_s = _score(b_q, b_k, b_dot_scale, int8_keys, SHAPE.PRECISION)
        b_s = tl.where(kept[None, :], b_s, float("-inf"))
        softmax = _softmax_step(b_s, b_v, scale, margin, softmax, SHAPE.PRECISION)
    return softmax


@triton.jit
def _load_keys(int8_keys, i, entry, source, SHAPE):
    """Load the keys [BLOCK_N, BLOCK_D] of the list's i-th block and, for 8-bit keys, the scale of each product."""
    if int8_keys is None:
        return _load_block(KEYS, entry, source, SHAPE), 1.0
    else:
        o_n = tl.arange(0, SHAPE.BLOCK_N)
        i_key = int8_keys.first_key + tl.load(int8_keys.block_ids + i) * SHAPE.BLOCK_N
        if source.smooth_matrix is not None:
            b_k = source.smooth_matrix.load([i_key, 0])
        else:
            o_int = (i_key + o_n).to(tl.int64)[:, None] * SHAPE.BLOCK_D + tl.arange(0, SHAPE.BLOCK_D)[None, :]
            b_k = tl.load(int8_keys.integers + o_int)
        scales = int8_keys.scales + i_key // SCALE_TOKENS
        b_dot_scale = tl.full([SHAPE.BLOCK_N], 0.0, tl.float32) + tl.load(scales) * int8_keys.query_scale
        if SHAPE.BLOCK_N > SCALE_TOKENS:
            second_scale = tl.load(scales + 1) * int8_keys.query_scale
            b_dot_scale = tl.where(o_n < SCALE_TOKENS, b_dot_scale, second_scale)
        return b_k, b_dot_scale


@triton.jit
def _score(b_q, b_k, b_dot_scale, int8_keys, PRECISION: tl.constexpr):
    """Compute scores [BLOCK_M, BLOCK_N]: unscaled, except those of 8-bit vectors."""
    if int8_keys is None:
        return tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    else:
        return tl.dot(b_q, tl.trans(b_k)).to(tl.float32) * b_dot_scale[None, :]


@triton.jit
def _load_block(KIND: tl.constexpr, entry, source, SHAPE):
    """Load the KEYS or VALUES [BLOCK_N, BLOCK_D] of a block; undefined past the sequence's end.

    ``entry`` is the block's place if the cache is a matrix, otherwise its id.
    """
    cache, matrix, i_kv = source.cache, source.matrix, source.i_kv
    if source.k_matrix is not None:
        descriptor = source.k_matrix if KIND == KEYS else source.v_matrix
        return descriptor.load([entry + i_kv * matrix.rows_per_head, i_kv * matrix.columns_per_head])
    else:
        o_d = tl.arange(0, SHAPE.BLOCK_D)
        o_n = tl.arange(0, SHAPE.BLOCK_N)
        if matrix is not None:
            o_key = (entry + o_n).to(tl.int64) * cache.stride_token
        else:
            # The table may have no page past the sequence's end.
            o_n += entry * SHAPE.BLOCK_N
            in_row = o_n < source.tile_end
            o_key = key_offsets(source.table, o_n, in_row, cache.page_size, cache.stride_page, cache.stride_token)
        pointer = (cache.k if KIND == KEYS else cache.v) + i_kv.to(tl.int64) * cache.stride_head
        return tl.load(pointer + o_key[:, None] + o_d[None, :], mask=(o_d < SHAPE.HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _softmax_step(b_s, b_v, scale, margin, softmax, PRECISION: tl.constexpr):
    """Process one step of the online softmax, with unscaled scores [M, N] and values [N, D].

    ``scale`` converts scores to base 2. The maximum is stored scaled, so that each exponent takes one fused
    multiply-add. The exponentials of every step are added to the sum. The product is skipped if no local maximum comes
    within ``margin`` of its query's running maximum; then no maximum has changed, and the accumulator stays as it is.
    """
    b_v = widen(b_v)
    b_local = tl.max(b_s, 1) * scale
    b_max = tl.maximum(softmax.b_max, b_local)
    b_decay = tl.exp2(softmax.b_max - b_max)
    b_p = tl.exp2(b_s * scale - b_max[:, None])
    b_sum = softmax.b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = softmax.b_acc
    if margin is None:
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
    else:
        if tl.max(b_local - b_max, 0) >= margin:
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
    return Softmax(b_acc, b_max, b_sum)
