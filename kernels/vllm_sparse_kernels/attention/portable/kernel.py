# SPDX-License-Identifier: Apache-2.0
"""The kernel of the engine ``portable``: attention of one (query head, tile)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.attention.portable.sage import Int8Keys, load_int8_block, load_int8_stripes
from vllm_sparse_kernels.attention.smooth_keys import quantize
from vllm_sparse_kernels.compile_time import LOG2_E, Constant
from vllm_sparse_kernels.online_softmax import Softmax, softmax_step
from vllm_sparse_kernels.paged import key_offsets, load_queries, store_outputs
from vllm_sparse_kernels.selection.lists import list_of, load_row, load_tile
from vllm_sparse_kernels.vectors import load_vector, padded_mask

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
    AHEAD: Any  # whole steps that are loaded ahead; 0 to let the compiler load keys and values separately


class Program(NamedTuple):
    """The queries of a program: those of a tile, or a part of them."""

    i_kv: Any
    i_head: Any
    i_tile: Any
    i_row: Any
    num_tiles: Any
    token: Any  # the program's first query in q
    first: Any  # its position
    length: Any  # number of queries; not positive for parts past the tile's last query
    tile_first: Any  # position of the tile's first query
    tile_end: Any  # position after the tile's last query


class BlockList(NamedTuple):
    """The list of blocks of one tile and head."""

    blocks: Any  # pointer to the ids of the blocks
    num_full: Any  # blocks before the tile's diagonal, which need no mask
    num_blocks: Any  # blocks up to the last query of the program


class KeyValueSource(NamedTuple):
    """The keys and values of one row and kv head."""

    cache: Any  # KeyArgs with values
    table: Any  # pointer to the row's pages
    i_kv: Any
    tile_end: Any  # position after the tile's last query


@triton.jit
def attend_kernel(queries, cache, index, scale, value_scale, skip_margins, int8_heads, smooth, SHAPE):
    """Compute O = softmax(scale · Q Kᵀ) V of one (query head, tile), over the index's keys up to each query's position.

    If the GPU cannot hold all queries of a tile in one program, each of PARTS programs processes BLOCK_M of them.

    Online softmax in float32 and base 2. For each step, S = scale log₂e · Q Kᵀ, m' = max(m, max S),
    l' = 2^(m − m') l + Σ 2^(S − m'), O' = 2^(m − m') O + 2^(S − m') V; at the end O / l, where a sink adds
    2^(sink log₂e − m) to l. An approximation that no head requests leaves no code in the kernel.

    Grid: (tiles · query heads · PARTS), ordered by kv head, then by tile with the longest first, then by head of the
    group, then by part.
    Bound by the matrix units, by exponentials at head_dim 64, and by the gather for stripes.

    Args:
        queries: ``AttendArgs``; q and out [tokens, NUM_HEADS, HEAD_DIM] in 16 bits.
        cache: ``KeyArgs`` with values, pages of [page_size, kv heads, HEAD_DIM].
        skip_margins: [NUM_HEADS] float32, SpargeAttn's λ in natural units; None to skip nothing.
        int8_heads: [NUM_HEADS] uint8, 1 for heads with 8-bit scores. If it is None and ``smooth`` is not, all heads
            have them.
        smooth: ``SmoothKeys``; None if no head has 8-bit scores.
    """
    program = _load_program(index, SHAPE)
    b_q = load_queries(
        queries, program.i_head, program.token, program.length, SHAPE.BLOCK_M, SHAPE.HEAD_DIM, SHAPE.BLOCK_D
    )  # [M, D]
    lists = _load_block_list(index, program, SHAPE)
    table = cache.block_table + program.i_row.to(tl.int64) * cache.stride_table
    source = KeyValueSource(cache, table, program.i_kv, program.tile_end)
    margin = None
    b_max = tl.full([SHAPE.BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([SHAPE.BLOCK_M], tl.float32)
    if skip_margins is not None:
        margin = tl.load(skip_margins + program.i_head) * LOG2_E
        in_tile = tl.arange(0, SHAPE.BLOCK_M) < program.length
        b_max, b_sum = tl.where(in_tile, b_max, UNREACHED), tl.where(in_tile, b_sum, 1.0)
    softmax = Softmax(tl.zeros([SHAPE.BLOCK_M, SHAPE.BLOCK_D], tl.float32), b_max, b_sum)
    if smooth is None:
        softmax = _walk(b_q, None, lists, index, program, source, scale, margin, softmax, SHAPE)
    else:
        in_8_bits = True
        if int8_heads is not None:
            in_8_bits = tl.load(int8_heads + program.i_head) != 0
        if in_8_bits:
            softmax = _walk_int8(b_q, smooth, lists, index, program, source, scale, margin, softmax, SHAPE)
        else:
            softmax = _walk(b_q, None, lists, index, program, source, scale, margin, softmax, SHAPE)
    _store_output(queries, program, softmax, value_scale, SHAPE)


@triton.jit
def _walk_int8(b_q, smooth, lists, index, program, source, scale, margin, softmax, SHAPE):
    """Run ``_walk`` with 8-bit scores. The returned maximum includes the shift that smoothing removed from scores."""
    i_mean = program.i_row * (SHAPE.NUM_HEADS // SHAPE.GROUP) + program.i_kv
    b_mean = load_vector(smooth.means, i_mean, SHAPE.BLOCK_D)
    b_shift = tl.sum(b_q.to(tl.float32) * b_mean[None, :], 1) * scale
    b_int, query_scale = quantize(b_q.to(tl.float32))
    _, _, _, key_start = load_row(smooth.rows, program.i_row)
    first_key = program.i_kv * smooth.num_keys + key_start
    int8_keys = Int8Keys(smooth.integers, smooth.scales, first_key, query_scale * scale)
    softmax = _walk(b_int, int8_keys, lists, index, program, source, 1.0, margin, softmax, SHAPE)
    return Softmax(softmax.b_acc, softmax.b_max + b_shift, softmax.b_sum)


@triton.jit
def _walk(b_q, int8_keys, lists, index, program, source, scale, margin, softmax, SHAPE):
    """Process all keys that the tile keeps.

    ``int8_keys`` replaces the keys if ``b_q`` is 8-bit; otherwise None. ``margin`` is λ in base 2; None without skips.
    """
    softmax = _full_blocks(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE)
    softmax = _diagonal_blocks(b_q, int8_keys, lists, program, source, scale, margin, softmax, SHAPE)
    if SHAPE.STRIPES > 0:
        softmax = _single_keys(b_q, int8_keys, index, program, source, scale, margin, softmax, SHAPE)
    return softmax


@triton.jit
def _load_program(index, SHAPE):
    """Return the queries of this program.

    Order of programs: kv head, then tile with the longest first, then head of the group, then part.
    """
    i_program = tl.program_id(0) // SHAPE.PARTS
    part_start = tl.program_id(0) % SHAPE.PARTS * SHAPE.BLOCK_M  # the program's first query in the tile
    num_tiles = tl.num_programs(0) // (SHAPE.NUM_HEADS * SHAPE.PARTS)
    i_kv = i_program // (num_tiles * SHAPE.GROUP)
    i_tile = tl.load(index.order + i_program % (num_tiles * SHAPE.GROUP) // SHAPE.GROUP)
    i_head = i_kv * SHAPE.GROUP + i_program % SHAPE.GROUP
    i_row, token, tile_length, tile_first = load_tile(index.tiles, i_tile)
    length = tl.minimum(tile_length - part_start, SHAPE.BLOCK_M)
    return Program(
        i_kv, i_head, i_tile, i_row, num_tiles, token + part_start, tile_first + part_start, length, tile_first,
        tile_first + tile_length,
    )  # fmt: skip


@triton.jit
def _load_block_list(index, program, SHAPE):
    """Return the list of blocks of the program's head and tile. Diagonal blocks are always listed, and come last."""
    i_head, i_tile = program.i_head, program.i_tile
    blocks = list_of(index, i_head.to(tl.int64), i_tile)
    num_blocks = tl.load(index.block_counts + i_head * program.num_tiles + i_tile)
    last_block = (program.tile_end - 1) // SHAPE.BLOCK_N
    num_full = num_blocks - (last_block - program.tile_first // SHAPE.BLOCK_N + 1)
    if SHAPE.PARTS > 1:
        num_blocks -= last_block - (program.first + program.length - 1) // SHAPE.BLOCK_N
        num_full = tl.where(program.length > 0, num_full, 0)
        num_blocks = tl.where(program.length > 0, num_blocks, 0)
    return BlockList(blocks, num_full, num_blocks)


@triton.jit
def _store_output(queries, program, softmax, value_scale, SHAPE):
    """Store the output of the program's queries."""
    o_m = tl.arange(0, SHAPE.BLOCK_M)
    b_total = softmax.b_sum
    if queries.sinks is not None:
        b_total += tl.exp2(tl.load(queries.sinks + program.i_head).to(tl.float32) * LOG2_E - softmax.b_max)
    b_out = softmax.b_acc / b_total[:, None] * value_scale
    store_outputs(
        queries, program.i_head, program.token + o_m, o_m < program.length, b_out, SHAPE.HEAD_DIM, SHAPE.BLOCK_D
    )


@triton.jit
def _full_blocks(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE):
    """Process the blocks that lie before all queries of the tile.

    No address depends on a value that an iteration carries to the next, because Triton does not pipeline such loads.

    Triton pipelines the loads of products at the loop's top level, or all loads if there is no such product. The step
    is therefore in a branch whose condition is always true but unknown to the compiler, and all of its data are loaded
    AHEAD buffers before. Without AHEAD there is no margin: see ``engine._buffers_ahead``.
    """
    for i in tl.range(0, lists.num_full, num_stages=SHAPE.AHEAD if SHAPE.AHEAD > 0 else None):
        i_block = tl.load(lists.blocks + i)
        b_k, b_dot_scale = _load_keys(int8_keys, i_block, source, SHAPE)  # [N, D]
        if SHAPE.AHEAD > 0:
            b_v = _load_block(source.cache.v, i_block, source, SHAPE)
            if lists.num_full > 0:
                b_s = _score(b_q, b_k, b_dot_scale, int8_keys)  # [M, N]
                softmax = softmax_step(b_s, b_v, scale, margin, softmax)
        else:
            b_s = _score(b_q, b_k, b_dot_scale, int8_keys)
            b_v = _load_block(source.cache.v, i_block, source, SHAPE)
            softmax = softmax_step(b_s, b_v, scale, None, softmax)
    return softmax


@triton.jit
def _diagonal_blocks(b_q, int8_keys, lists, program, source, scale, margin, softmax, SHAPE):
    """Process the diagonal blocks, with the causal mask. The first one has a key for each of the program's queries."""
    first_block = program.tile_first // SHAPE.BLOCK_N
    o_m = program.first + tl.arange(0, SHAPE.BLOCK_M)
    for i in range(lists.num_full, lists.num_blocks):
        i_block = tl.load(lists.blocks + i)
        o_n = (first_block + i - lists.num_full) * SHAPE.BLOCK_N + tl.arange(0, SHAPE.BLOCK_N)
        b_k, b_dot_scale = _load_keys(int8_keys, i_block, source, SHAPE)
        b_s = _score(b_q, b_k, b_dot_scale, int8_keys)
        b_s = tl.where(o_n[None, :] <= o_m[:, None], b_s, float("-inf"))
        # Past the sequence's end the cache may hold NaN, and 0 · NaN is NaN.
        b_v = _load_block(source.cache.v, i_block, source, SHAPE)
        b_v = tl.where((o_n < source.tile_end)[:, None], b_v, 0.0)
        softmax = softmax_step(b_s, b_v, scale, margin, softmax)
    return softmax


@triton.jit
def _single_keys(b_q, int8_keys, index, program, source, scale, margin, softmax, SHAPE):
    """Process the stripes, a step at a time; all lie before the tile's first query."""
    cache, o_d = source.cache, tl.arange(0, SHAPE.BLOCK_D)
    o_list = program.i_head * program.num_tiles + program.i_tile
    stripes = index.stripe_positions + tl.load(index.stripe_offsets + o_list)
    num_stripes = tl.load(index.stripe_counts + o_list)
    for i in range(0, num_stripes, SHAPE.STRIPES):
        o_n = i + tl.arange(0, SHAPE.STRIPES)
        kept = o_n < num_stripes
        b_n = tl.load(stripes + o_n, mask=kept, other=0)
        o_key = key_offsets(source.table, b_n, kept, cache.page_size, cache.stride_page, cache.stride_token)
        o_kv = source.i_kv.to(tl.int64) * cache.stride_head + o_key[:, None] + o_d[None, :]
        in_kv = padded_mask(kept, SHAPE.HEAD_DIM, SHAPE.BLOCK_D)
        if int8_keys is None:
            b_k, b_dot_scale = tl.load(cache.k + o_kv, mask=in_kv, other=0.0), 1.0
        else:
            b_k, b_dot_scale = load_int8_stripes(int8_keys, b_n, SHAPE)
        b_v = tl.load(cache.v + o_kv, mask=in_kv, other=0.0)
        b_s = _score(b_q, b_k, b_dot_scale, int8_keys)
        b_s = tl.where(kept[None, :], b_s, float("-inf"))
        softmax = softmax_step(b_s, b_v, scale, margin, softmax)
    return softmax


@triton.jit
def _load_keys(int8_keys, i_block, source, SHAPE):
    """Load the keys [BLOCK_N, BLOCK_D] of a block and, for 8-bit keys, the scale of each product."""
    if int8_keys is None:
        return _load_block(source.cache.k, i_block, source, SHAPE), 1.0
    else:
        return load_int8_block(int8_keys, i_block, SHAPE)


@triton.jit
def _load_block(vectors, i_block, source, SHAPE):
    """Load a block of the cache's keys or values [BLOCK_N, BLOCK_D]; undefined past the sequence's end."""
    cache, o_d = source.cache, tl.arange(0, SHAPE.BLOCK_D)
    o_n = i_block * SHAPE.BLOCK_N + tl.arange(0, SHAPE.BLOCK_N)
    # The table may have no page past the sequence's end.
    in_row = o_n < source.tile_end
    o_key = key_offsets(source.table, o_n, in_row, cache.page_size, cache.stride_page, cache.stride_token)
    pointer = vectors + source.i_kv.to(tl.int64) * cache.stride_head
    return tl.load(pointer + o_key[:, None] + o_d[None, :], mask=(o_d < SHAPE.HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _score(b_q, b_k, b_dot_scale, int8_keys):
    """Compute scores [BLOCK_M, BLOCK_N]: unscaled, except those of 8-bit vectors."""
    if int8_keys is None:
        return tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    else:
        return tl.dot(b_q, tl.trans(b_k)).to(tl.float32) * b_dot_scale[None, :]
