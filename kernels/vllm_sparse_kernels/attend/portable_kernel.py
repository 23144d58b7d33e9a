# SPDX-License-Identifier: Apache-2.0
"""What a program of ``attend`` does: one (query head, tile), its blocks and then its stripes.

Every option is a constexpr: what is None leaves nothing behind in the compiled kernel.
"""

import triton
import triton.language as tl

from vllm_sparse_kernels.attend.smooth_keys import STEP_TOKENS, quantize
from vllm_sparse_kernels.paged import key_offsets, widen

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

UNREACHED = tl.constexpr(1e30)
"""Running maximum of what is no query: no block comes near it, so that it holds up no skip."""


@triton.jit
def place_blocks_kernel(
    index, block_table, stride_table, places, page_size, rows_per_page,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Where the blocks of one (query head, tile) lie in the cache's matrix of tokens: ``places``, as block_ids.

    Of block j of a row: block_table[row, BLOCK_N j // page_size] · rows_per_page + BLOCK_N j mod page_size, tokens.
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
    smooth, smooth_matrix,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STRIPES: tl.constexpr, FIELDS: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """O = softmax(scale · Q Kᵀ) V of one (query head, tile), over the index's keys up to each query's own position.

    q and out [tokens, NUM_HEADS, HEAD_DIM], 16 bits; keys and values in pages of ``cache``; lse [NUM_HEADS, tokens]
    float32, in natural units. Online softmax in float32 and base 2: of each step S = scale log₂e · Q Kᵀ,
    m' = max(m, max S), l' = 2^(m − m') l + Σ 2^(S − m'), O' = 2^(m − m') O + 2^(S − m') V; at the end O / l, where a
    sink adds 2^(sink log₂e − m) to l.
    ``skip_margins`` [NUM_HEADS] are SpargeAttn's λ, in natural units.
    """
    # kv head, then tile by falling weight, then head of the group
    i_program = tl.program_id(0)
    num_tiles = tl.num_programs(0) // NUM_HEADS
    i_kv = i_program // (num_tiles * GROUP)
    i_tile = tl.load(index.order + i_program % (num_tiles * GROUP) // GROUP)
    i_head = i_kv * GROUP + i_program % GROUP

    i_row = tl.load(index.tiles + i_tile * FIELDS)
    token = tl.load(index.tiles + i_tile * FIELDS + 1)
    length = tl.load(index.tiles + i_tile * FIELDS + 2)
    first = tl.load(index.tiles + i_tile * FIELDS + 3)
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_q = (token + o_m).to(tl.int64)
    in_tile = o_m < length
    in_head = in_tile[:, None] & (o_d < HEAD_DIM)[None, :]
    b_q = tl.load(
        queries.q + o_q[:, None] * queries.stride_token + i_head * queries.stride_head + o_d[None, :],
        mask=in_head, other=0.0,
    )  # fmt: skip
    table = cache.block_table + i_row.to(tl.int64) * cache.stride_table

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    margin = None
    if skip_margins is not None:
        margin = tl.load(skip_margins + i_head) * LOG2_E
        b_max = tl.where(in_tile, b_max, UNREACHED)
        b_sum = tl.where(in_tile, b_sum, 1.0)

    # Blocks before the diagonal need no mask; the diagonal ones are always there, and last.
    blocks = index.block_ids + i_head.to(tl.int64) * index.stride_blocks + tl.load(index.block_offsets + i_tile)
    num_blocks = tl.load(index.block_counts + i_head * num_tiles + i_tile)
    num_full = num_blocks - ((first + length - 1) // BLOCK_N - first // BLOCK_N + 1)
    lists = (blocks, num_full, num_blocks, first, index, i_head, i_tile, num_tiles)
    where = (cache, k_matrix, v_matrix, matrix, table, i_kv, first + length, smooth_matrix)
    SHAPE: tl.constexpr = (BLOCK_N, STRIPES, HEAD_DIM, BLOCK_D, PRECISION, AHEAD)
    b_acc, b_max, b_sum = _walk_as_asked(
        b_q, smooth, int8_heads, i_row, lists, where, scale, margin, b_acc, b_max, b_sum, SHAPE
    )

    b_total = b_sum
    if queries.sinks is not None:
        b_total += tl.exp2(tl.load(queries.sinks + i_head).to(tl.float32) * LOG2_E - b_max)
    b_out = (b_acc / b_total[:, None] * value_scale).to(queries.out.dtype.element_ty)
    o_out = o_q[:, None] * queries.stride_out_token + i_head * queries.stride_out_head + o_d[None, :]
    tl.store(queries.out + o_out, b_out, mask=in_head)
    if queries.lse is not None:
        b_lse = (b_max + tl.log2(b_sum)) * LN_2
        tl.store(queries.lse + i_head.to(tl.int64) * queries.stride_lse_head + o_q, b_lse, mask=in_tile)


@triton.jit
def _walk_as_asked(
    b_q, smooth, int8_heads, i_row, lists, where, scale, margin, b_acc, b_max, b_sum, SHAPE: tl.constexpr
):  # fmt: skip
    """``_walk`` with the scores that the head asks for; where all heads ask for the same, with no other compiled."""
    if smooth is None:
        b_acc, b_max, b_sum = _walk(b_q, None, lists, where, scale, margin, b_acc, b_max, b_sum, SHAPE)
    else:
        in_8_bits = True
        if int8_heads is not None:
            in_8_bits = tl.load(int8_heads + lists[5]) != 0
        if in_8_bits:
            b_acc, b_max, b_sum = _walk_int8(
                b_q, smooth, i_row, lists, where, scale, margin, b_acc, b_max, b_sum, SHAPE
            )  # fmt: skip
        else:
            b_acc, b_max, b_sum = _walk(b_q, None, lists, where, scale, margin, b_acc, b_max, b_sum, SHAPE)
    return b_acc, b_max, b_sum


@triton.jit
def _walk(b_q, eight, lists, where, scale, margin, b_acc, b_max, b_sum, SHAPE: tl.constexpr):
    """All that the tile keeps. ``eight`` is None, or says where the 8-bit keys lie that b_q, then 8-bit too, meets."""
    blocks, num_full, num_blocks, first, index, i_head, i_tile, num_tiles = lists
    b_acc, b_max, b_sum = _walk_full(
        b_q, eight, blocks, num_full, where, scale, margin, b_acc, b_max, b_sum, SHAPE
    )  # fmt: skip
    b_acc, b_max, b_sum = _walk_diagonal(
        b_q, eight, blocks, num_full, num_blocks, first, where, scale, margin, b_acc, b_max, b_sum, SHAPE
    )
    if SHAPE[1] > 0:
        stripes = index.stripe_positions + tl.load(index.stripe_offsets + i_head * num_tiles + i_tile)
        num_stripes = tl.load(index.stripe_counts + i_head * num_tiles + i_tile)
        b_acc, b_max, b_sum = _walk_stripes(
            b_q, eight, stripes, num_stripes, where, scale, margin, b_acc, b_max, b_sum, SHAPE
        )  # fmt: skip
    return b_acc, b_max, b_sum


@triton.jit
def _walk_int8(b_q, smooth, i_row, lists, where, scale, margin, b_acc, b_max, b_sum, SHAPE: tl.constexpr):
    """``_walk`` with 8-bit scores. The maximum comes back with what smoothing took off all of a query's scores."""
    _, _, _, _, index, i_head, i_tile, _ = lists
    BLOCK_D: tl.constexpr = SHAPE[3]
    i_kv = where[5]
    b_mean = tl.load(smooth.means + i_row * smooth.stride_means + i_kv * BLOCK_D + tl.arange(0, BLOCK_D))
    b_shift = tl.sum(b_q.to(tl.float32) * b_mean[None, :], 1) * scale
    b_int, step = quantize(b_q.to(tl.float32))
    start = i_kv * smooth.num_keys + tl.load(smooth.starts + i_row)
    ids = smooth.block_ids + i_head.to(tl.int64) * index.stride_blocks + tl.load(index.block_offsets + i_tile)
    eight = (ids, smooth.integers, smooth.steps, start, step * scale)
    b_acc, b_max, b_sum = _walk(b_int, eight, lists, where, 1.0, margin, b_acc, b_max, b_sum, SHAPE)
    return b_acc, b_max + b_shift, b_sum


@triton.jit
def _walk_full(
    b_q, eight, blocks, num_full, where, scale, margin, b_acc, b_max, b_sum, SHAPE: tl.constexpr
):  # fmt: skip
    """Blocks that every query of the tile sees whole.

    Nothing that places a block is carried from one iteration to the next: loads that depend on carried values are not
    pipelined.

    Triton pipelines the loads that products at the loop's top level need, and only where there is no such product all
    loads. So the step stands in a branch (its condition holds: the compiler does not see it), and all that a step needs
    is loaded AHEAD buffers before. With a margin, where the values' product is in a branch anyway, nothing else loads
    them before they are needed.
    """
    AHEAD: tl.constexpr = SHAPE[5]
    for i in tl.range(0, num_full, num_stages=AHEAD if AHEAD > 0 else None):
        entry = tl.load(blocks + i)
        b_k, b_step = _load_keys(eight, i, entry, where, SHAPE)
        if AHEAD > 0:
            b_v = _load_block(1, entry, where, SHAPE)
            if num_full > 0:
                b_s = _score(b_q, b_k, b_step, eight, SHAPE[4])
                b_acc, b_max, b_sum = _fold(b_s, b_v, scale, margin, b_acc, b_max, b_sum, SHAPE[4])
        else:
            b_s = _score(b_q, b_k, b_step, eight, SHAPE[4])
            b_v = _load_block(1, entry, where, SHAPE)
            b_acc, b_max, b_sum = _fold(b_s, b_v, scale, None, b_acc, b_max, b_sum, SHAPE[4])
    return b_acc, b_max, b_sum


@triton.jit
def _walk_diagonal(
    b_q, eight, blocks, start, end, first, where, scale, margin, b_acc, b_max, b_sum, SHAPE: tl.constexpr
):  # fmt: skip
    """Blocks with keys that some queries of the tile may not see."""
    BLOCK_N: tl.constexpr = SHAPE[0]
    o_m = first + tl.arange(0, b_q.shape[0])
    limit = where[6]
    for i in range(start, end):
        entry = tl.load(blocks + i)
        o_n = (first // BLOCK_N + i - start) * BLOCK_N + tl.arange(0, BLOCK_N)
        b_k, b_step = _load_keys(eight, i, entry, where, SHAPE)
        b_s = _score(b_q, b_k, b_step, eight, SHAPE[4])
        b_s = tl.where(o_n[None, :] <= o_m[:, None], b_s, float("-inf"))
        # Past the sequence's end the cache holds anything, NaN too, and 0 · NaN would still be NaN.
        b_v = _load_block(1, entry, where, SHAPE)
        b_v = tl.where((o_n < limit)[:, None], b_v, 0.0)
        b_acc, b_max, b_sum = _fold(b_s, b_v, scale, margin, b_acc, b_max, b_sum, SHAPE[4])
    return b_acc, b_max, b_sum


@triton.jit
def _walk_stripes(
    b_q, eight, stripes, num_stripes, where, scale, margin, b_acc, b_max, b_sum, SHAPE: tl.constexpr
):  # fmt: skip
    """Single keys, gathered a step of them at a time; all lie before the tile's first query."""
    STRIPES: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[3]
    cache, table, i_kv = where[0], where[4], where[5]
    o_d = tl.arange(0, BLOCK_D)
    for i in range(0, num_stripes, STRIPES):
        o_n = i + tl.arange(0, STRIPES)
        kept = o_n < num_stripes
        b_n = tl.load(stripes + o_n, mask=kept, other=0)
        o_key = key_offsets(table, b_n, kept, cache.page_size, cache.stride_page, cache.stride_token)
        o_kv = i_kv.to(tl.int64) * cache.stride_head + o_key[:, None] + o_d[None, :]
        in_kv = kept[:, None] & (o_d < SHAPE[2])[None, :]
        if eight is None:
            b_k = tl.load(cache.k + o_kv, mask=in_kv, other=0.0)
            b_step = 1.0
        else:
            _, integers, steps, start, query_step = eight
            b_k = tl.load(integers + (start + b_n).to(tl.int64)[:, None] * BLOCK_D + o_d[None, :])
            b_step = tl.load(steps + (start + b_n) // STEP_TOKENS) * query_step
        b_v = tl.load(cache.v + o_kv, mask=in_kv, other=0.0)
        b_s = _score(b_q, b_k, b_step, eight, SHAPE[4])
        b_s = tl.where(kept[None, :], b_s, float("-inf"))
        b_acc, b_max, b_sum = _fold(b_s, b_v, scale, margin, b_acc, b_max, b_sum, SHAPE[4])
    return b_acc, b_max, b_sum


@triton.jit
def _load_keys(eight, i, entry, where, SHAPE: tl.constexpr):
    """Keys [BLOCK_N, BLOCK_D] of the i-th block of the list, and what a product with each counts if they are 8-bit."""
    if eight is None:
        return _load_block(0, entry, where, SHAPE), 1.0
    else:
        BLOCK_N: tl.constexpr = SHAPE[0]
        BLOCK_D: tl.constexpr = SHAPE[3]
        ids, integers, steps, start, query_step = eight
        smooth_matrix = where[7]
        o_n = tl.arange(0, BLOCK_N)
        i_key = start + tl.load(ids + i) * BLOCK_N
        if smooth_matrix is not None:
            b_k = smooth_matrix.load([i_key, 0])
        else:
            b_k = tl.load(integers + (i_key + o_n).to(tl.int64)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :])
        b_step = tl.full([BLOCK_N], 0.0, tl.float32) + tl.load(steps + i_key // STEP_TOKENS) * query_step
        if BLOCK_N > STEP_TOKENS:
            later = tl.load(steps + i_key // STEP_TOKENS + 1) * query_step
            b_step = tl.where(o_n < STEP_TOKENS, b_step, later)
        return b_k, b_step


@triton.jit
def _score(b_q, b_k, b_step, eight, PRECISION: tl.constexpr):
    """Scores [BLOCK_M, BLOCK_N], raw; those of 8-bit vectors are scaled already."""
    if eight is None:
        return tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    else:
        return tl.dot(b_q, tl.trans(b_k)).to(tl.float32) * b_step[None, :]


@triton.jit
def _load_block(WHICH: tl.constexpr, entry, where, SHAPE: tl.constexpr):
    """Keys (WHICH 0) or values (1) of a block: [BLOCK_N, BLOCK_D]. Past the sequence's end they hold anything.

    ``entry`` is the block's place where ``matrix`` is given, else its id.
    """
    cache, k_matrix, v_matrix, matrix, table, i_kv, limit, _ = where
    if k_matrix is not None:
        matrix_desc = k_matrix if WHICH == 0 else v_matrix
        return matrix_desc.load([entry + i_kv * matrix.rows_per_head, i_kv * matrix.columns_per_head])
    else:
        BLOCK_N: tl.constexpr = SHAPE[0]
        o_d = tl.arange(0, SHAPE[3])
        o_n = tl.arange(0, BLOCK_N)
        if matrix is not None:
            o_key = (entry + o_n).to(tl.int64) * cache.stride_token
        else:
            # The table may hold no page past the sequence's end.
            o_n += entry * BLOCK_N
            o_key = key_offsets(table, o_n, o_n < limit, cache.page_size, cache.stride_page, cache.stride_token)
        pointer = (cache.k if WHICH == 0 else cache.v) + i_kv.to(tl.int64) * cache.stride_head
        return tl.load(pointer + o_key[:, None] + o_d[None, :], mask=(o_d < SHAPE[2])[None, :], other=0.0)


@triton.jit
def _fold(b_s, b_v, scale, margin, b_acc, b_max, b_sum, PRECISION: tl.constexpr):
    """One step of the online softmax: raw scores [M, N] and values [N, D] into (acc, max, sum).

    ``scale`` takes scores to base 2; the maximum is kept scaled, so that each exponent is one fused multiply-add.
    A step's exponents always go into the sum. Its product is left out where none of its maxima comes as near to its
    query's as ``margin``: then no maximum has changed, and acc stays as it is.
    """
    b_v = widen(b_v)
    b_local = tl.max(b_s, 1) * scale
    b_new_max = tl.maximum(b_max, b_local)
    b_decay = tl.exp2(b_max - b_new_max)
    b_p = tl.exp2(b_s * scale - b_new_max[:, None])
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    if margin is None:
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
    else:
        if tl.max(b_local - b_new_max, 0) >= margin:
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
    return b_acc, b_new_max, b_sum
