# SPDX-License-Identifier: Apache-2.0
"""Attention of the engine ``portable`` with approximations: 8-bit scores, and skipped products.

Both are options of heads (``AttendOptions``). An option that no head has leaves no code in the kernel.

* SpargeAttn's skip of P·V tests all 128 queries of a tile together. The paper tests the queries of a warp (16 or 32)
  and therefore skips more. (The authors' kernels, as compiled, test a block of 64 or 128.) All warps of a Triton
  program must take the same branch. Two products of 64 queries would not help: a warp group's matrix instruction takes
  64 rows, so the two groups would share each half, and its probabilities would cross between them through shared
  memory.
* 8-bit scores are SageAttention's, in SpargeAttn and SALE: ``smooth_keys.py``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.attention.portable.kernel import (
    KEYS,
    VALUES,
    KeyValueSource,
    Softmax,
    empty_softmax,
    exponentials,
    load_block,
    load_block_list,
    load_program,
    load_program_queries,
    load_stripe_list,
    store_output,
    stripe_offsets,
)
from vllm_sparse_kernels.attention.smooth_keys import SCALE_TOKENS, quantize
from vllm_sparse_kernels.compile_time import LOG2_E, Constant
from vllm_sparse_kernels.paged import widen

UNREACHED = Constant(1e30)
"""Running maximum of rows past the tile's last query, so high that these rows never prevent a skip."""


class Int8Keys(NamedTuple):
    """The 8-bit keys of one row and kv head."""

    block_ids: Any  # pointer to the ids of the tile's blocks
    integers: Any  # as in SmoothKeys
    scales: Any
    first_key: Any  # number of the row's first key in ``integers``
    query_scale: Any  # scale of the queries' integers, times the softmax's scale


class Sources(NamedTuple):
    """The keys and values of one row and kv head, and its 8-bit keys for bulk copies."""

    plain: Any  # KeyValueSource
    # Not in ``Int8Keys``: Triton 3.6 cannot compare a tuple that contains None with None.
    int8_matrix: Any  # descriptor of the 8-bit keys, or None


@triton.jit
def approximate_kernel(
    queries, cache, k_matrix, v_matrix, matrix, index, scale, value_scale, skip_margins, int8_heads,
    smooth, smooth_matrix, SHAPE,
):  # fmt: skip
    """Compute attention as ``attend_kernel`` does, with the approximations that the program's head requests.

    Args:
        skip_margins: [NUM_HEADS] float32, SpargeAttn's λ in natural units; None to skip nothing.
        int8_heads: [NUM_HEADS] uint8, 1 for heads with 8-bit scores. If it is None and ``smooth`` is not, all heads
            have them.
        smooth: ``SmoothArgs``; None if no head has 8-bit scores.
        smooth_matrix: Descriptor of the 8-bit keys with boxes of [BLOCK_N, BLOCK_D]; or None.
    """
    program = load_program(index, SHAPE)
    b_q = load_program_queries(queries, program, SHAPE)
    lists = load_block_list(index, program, SHAPE)
    table = cache.block_table + program.i_row.to(tl.int64) * cache.stride_table
    plain = KeyValueSource(cache, k_matrix, v_matrix, matrix, table, program.i_kv, program.tile_end)
    source = Sources(plain, smooth_matrix)
    softmax = empty_softmax(SHAPE)
    margin = None
    if skip_margins is not None:
        margin = tl.load(skip_margins + program.i_head) * LOG2_E
        in_tile = tl.arange(0, SHAPE.BLOCK_M) < program.length
        softmax = Softmax(
            softmax.b_acc, tl.where(in_tile, softmax.b_max, UNREACHED), tl.where(in_tile, softmax.b_sum, 1.0)
        )
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
    store_output(queries, program, softmax, value_scale, SHAPE)


@triton.jit
def _walk_int8(b_q, smooth, lists, index, program, source, scale, margin, softmax, SHAPE):
    """Run ``_walk`` with 8-bit scores. The returned maximum includes the shift that smoothing removed from scores."""
    o_mean = program.i_row * smooth.stride_means + program.i_kv * SHAPE.BLOCK_D + tl.arange(0, SHAPE.BLOCK_D)
    b_mean = tl.load(smooth.means + o_mean)
    b_shift = tl.sum(b_q.to(tl.float32) * b_mean[None, :], 1) * scale
    b_int, query_scale = quantize(b_q.to(tl.float32))
    first_key = program.i_kv * smooth.num_keys + tl.load(smooth.starts + program.i_row)
    block_ids = smooth.block_ids + program.i_head.to(tl.int64) * index.stride_blocks
    block_ids += tl.load(index.block_offsets + program.i_tile)
    int8_keys = Int8Keys(block_ids, smooth.integers, smooth.scales, first_key, query_scale * scale)
    softmax = _walk(b_int, int8_keys, lists, index, program, source, 1.0, margin, softmax, SHAPE)
    return Softmax(softmax.b_acc, softmax.b_max + b_shift, softmax.b_sum)


@triton.jit
def _walk(b_q, int8_keys, lists, index, program, source, scale, margin, softmax, SHAPE):
    """Process all keys that the tile keeps. ``int8_keys`` replaces the keys if b_q is 8-bit; otherwise None."""
    softmax = _full_blocks(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE)
    softmax = _diagonal_blocks(b_q, int8_keys, lists, program, source, scale, margin, softmax, SHAPE)
    if SHAPE.STRIPES > 0:
        softmax = _single_keys(b_q, int8_keys, index, program, source, scale, margin, softmax, SHAPE)
    return softmax


@triton.jit
def _full_blocks(b_q, int8_keys, lists, source, scale, margin, softmax, SHAPE):
    """Process the blocks that lie before all queries of the tile, as the plain kernel does.

    With a margin, the values' product is in a branch anyway, and nothing else would load values ahead. Without AHEAD
    there is no margin: see ``engine._buffers_ahead``.
    """
    for i in tl.range(0, lists.num_full, num_stages=SHAPE.AHEAD if SHAPE.AHEAD > 0 else None):
        entry = tl.load(lists.blocks + i)
        b_k, b_dot_scale = _load_keys(int8_keys, i, entry, source, SHAPE)
        if SHAPE.AHEAD > 0:
            b_v = load_block(VALUES, entry, source.plain, SHAPE)
            if lists.num_full > 0:
                b_s = _score(b_q, b_k, b_dot_scale, int8_keys, SHAPE.PRECISION)
                softmax = _softmax_step(b_s, b_v, scale, margin, softmax, SHAPE.PRECISION)
        else:
            b_s = _score(b_q, b_k, b_dot_scale, int8_keys, SHAPE.PRECISION)
            b_v = load_block(VALUES, entry, source.plain, SHAPE)
            softmax = _softmax_step(b_s, b_v, scale, None, softmax, SHAPE.PRECISION)
    return softmax


@triton.jit
def _diagonal_blocks(b_q, int8_keys, lists, program, source, scale, margin, softmax, SHAPE):
    """Process the diagonal blocks, with the causal mask."""
    first_block = program.tile_first // SHAPE.BLOCK_N
    o_m = program.first + tl.arange(0, SHAPE.BLOCK_M)
    for i in range(lists.num_full, lists.num_blocks):
        entry = tl.load(lists.blocks + i)
        o_n = (first_block + i - lists.num_full) * SHAPE.BLOCK_N + tl.arange(0, SHAPE.BLOCK_N)
        b_k, b_dot_scale = _load_keys(int8_keys, i, entry, source, SHAPE)
        b_s = _score(b_q, b_k, b_dot_scale, int8_keys, SHAPE.PRECISION)
        b_s = tl.where(o_n[None, :] <= o_m[:, None], b_s, float("-inf"))
        b_v = load_block(VALUES, entry, source.plain, SHAPE)
        b_v = tl.where((o_n < source.plain.tile_end)[:, None], b_v, 0.0)
        softmax = _softmax_step(b_s, b_v, scale, margin, softmax, SHAPE.PRECISION)
    return softmax


@triton.jit
def _single_keys(b_q, int8_keys, index, program, source, scale, margin, softmax, SHAPE):
    """Process the stripes, a step at a time."""
    cache, o_d = source.plain.cache, tl.arange(0, SHAPE.BLOCK_D)
    stripes, num_stripes = load_stripe_list(index, program)
    for i in range(0, num_stripes, SHAPE.STRIPES):
        o_n = i + tl.arange(0, SHAPE.STRIPES)
        kept = o_n < num_stripes
        b_n = tl.load(stripes + o_n, mask=kept, other=0)
        o_kv, in_kv = stripe_offsets(b_n, kept, source.plain, SHAPE)
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
        return load_block(KEYS, entry, source.plain, SHAPE), 1.0
    else:
        o_n = tl.arange(0, SHAPE.BLOCK_N)
        i_key = int8_keys.first_key + tl.load(int8_keys.block_ids + i) * SHAPE.BLOCK_N
        if source.int8_matrix is not None:
            b_k = source.int8_matrix.load([i_key, 0])
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
def _softmax_step(b_s, b_v, scale, margin, softmax, PRECISION: tl.constexpr):
    """Process one step of the online softmax, with unscaled scores [M, N] and values [N, D].

    The exponentials of every step are added to the sum. The product is skipped if no local maximum comes within
    ``margin`` of its query's running maximum; then no maximum has changed, and the accumulator stays as it is.
    """
    b_v = widen(b_v)
    b_p, b_decay, b_max, b_sum = exponentials(b_s, scale, softmax)
    b_acc = softmax.b_acc
    if margin is None:
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
    else:
        if tl.max(tl.max(b_s, 1) * scale - b_max, 0) >= margin:
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
    return Softmax(b_acc, b_max, b_sum)
