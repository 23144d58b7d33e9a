# SPDX-License-Identifier: Apache-2.0
"""Maps of queries and keys to few channels, whose products approximate the scores best.

For a row and kv head, let C_q be the second moment of the queries that use it, and C_k the covariance of its keys, both
in this step. Among all products of rank r, the best approximation of q·k in mean square is q' · k' with

    q' = Xᵀ q,    k' = Xᵀ C_q (k - mean key),

where the columns of X span the dominant r-dimensional invariant subspace of C_k C_q, and Xᵀ C_q X = 1. Orthogonal
iteration finds that subspace without an eigensolver: it sets X ← C_k C_q X, and orthonormalises X in C_q with a
Cholesky factor. It begins with the r channels with the largest weights (``rounding.py``). On a trained model (code-lm,
chunks of 2,048 and 8,192 tokens), two iterations explain 0.007 to 0.008 less of the score variance than the optimum on
average, and at most 0.016 less for any kv head.

The scores of a query and the row's keys, minus their mean, have the variance tr(C_q C_k) over the sample. Products of
mapped vectors hold tr(Wᵀ C_k W) of it, where W = C_q X: this share is counted for each row and kv head
(``share_counts.py``). Where it is low, attention has more directions than the maps have channels.

Samples depend only on the row. They contain at most 8,192 of its keys, and the first 128 queries of each tile: 64 if
the row has more than 16 tiles, and 32 if it has more than 32. Sums are added in a fixed order. The maps of a row
therefore do not depend on other rows.

Elements of 1e15 or more, infinities and NaNs count as 0 here, so that a token with such elements does not affect the
lists of other tokens.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.layer_inputs import LayerInputs
from vllm_sparse_kernels.paged import key_args, key_offsets, padded_dim, query_args, widen
from vllm_sparse_kernels.selection.lists import load_tile
from vllm_sparse_kernels.selection.parameters import on_device
from vllm_sparse_kernels.share_counts import EDGES, SHARE_FIELDS, count_share
from vllm_sparse_kernels.workspace import Workspace

PARTS = 16
"""Number of programs that add up the keys of a row and kv head, and number of programs that add up its queries."""

GROUP_TOKENS = Constant(64)
"""Keys in a group of the sample, and queries that are added by one product."""

SAMPLED_KEYS = 8192
"""Maximum number of sampled keys of a row."""

COLUMNS = Constant(128)
"""Maximum number of rows and columns of a moment in one program."""

ITERATIONS = 2

RIDGE = Constant(1e-3)
"""Added to the diagonals of moments, whose mean is 1, so that moments with unused channels are invertible."""

MAX_REGISTERS = 128
"""Register cap per thread of ``_products_kernel``, with which two programs of 256 threads fit on a multiprocessor."""

JITTER = Constant(1e-6)
"""Added to the diagonal of the matrix that is factorised, which has a diagonal of 1."""

LEAST_PIVOT = Constant(5e-7)
"""Minimum pivot of a column that is kept. Without rounding, no pivot would be below ``JITTER``. A smaller pivot belongs
to a column that depends on earlier columns, and consists of rounding errors, which its reciprocal would multiply. Such
columns become 0. Rows with fewer different queries or keys than channels have many of them."""

TINY = Constant(1e-30)  # replaces sums of zeros

TOO_LARGE = Constant(1e15)
STRIPE = Constant(16)
BYTES_AT_ONCE = 32 << 20
"""Maximum bytes of the sums of rows that are processed together."""


class SampleSums(NamedTuple):
    """Sums of the programs for some rows, and the moments and iterates that are computed from them."""

    means: Any  # [rows, kv heads, BLOCK_D] float32, of keys
    key_sums: Any  # [rows, kv heads, PARTS, BLOCK_D] float32
    key_products: Any  # [rows, kv heads, PARTS, BLOCK_D, BLOCK_D] float32
    query_products: Any  # [rows, kv heads, PARTS, BLOCK_D, BLOCK_D] float32
    moments: Any  # [rows, kv heads, 2, BLOCK_D, BLOCK_D] float32: of queries, then of keys
    iterates: Any  # [rows, kv heads, 2, BLOCK_D, r] float32: X, then C_q X


def rank_of(head_dim: int) -> int:
    """Return r, the number of channels that ``low_rank`` multiplies."""
    block_d = padded_dim(head_dim)
    return block_d // 4 if block_d > 64 else block_d


def sums_bytes(num_rows: int, num_kv_heads: int, block_d: int) -> int:
    """Return the memory for the sums of rows that are processed together."""
    return _rows_at_once(num_rows, num_kv_heads, block_d) * _row_bytes(num_kv_heads, block_d)


def _row_bytes(num_kv_heads: int, block_d: int) -> int:
    return 4 * num_kv_heads * block_d * (1 + PARTS + (2 * PARTS + 2) * block_d + 2 * rank_of(block_d))


def _rows_at_once(num_rows: int, num_kv_heads: int, block_d: int) -> int:
    return min(num_rows, max(BYTES_AT_ONCE // _row_bytes(num_kv_heads, block_d), 1))


def fill_maps(
    inputs: LayerInputs, means: torch.Tensor, maps: torch.Tensor, workspace: Workspace,
    variance_shares: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Compute the maps of each row and kv head, and the mean of its mapped keys."""
    q, cache, rows, _ = inputs
    num_kv_heads, block_d, rank = cache.num_kv_heads, maps.shape[3], maps.shape[4]
    width = min(block_d, COLUMNS.value)
    num_squares = (block_d // width) ** 2
    at_once = _rows_at_once(rows.num_rows, num_kv_heads, block_d)
    shape = {"HEAD_DIM": cache.head_dim, "BLOCK_D": block_d}
    edges = None if variance_shares is None else on_device(EDGES, q.device)
    with workspace.frame():
        sums = SampleSums(
            workspace.empty(at_once, num_kv_heads, block_d), workspace.empty(at_once, num_kv_heads, PARTS, block_d),
            workspace.empty(at_once, num_kv_heads, PARTS, block_d, block_d),
            workspace.empty(at_once, num_kv_heads, PARTS, block_d, block_d),
            workspace.empty(at_once, num_kv_heads, 2, block_d, block_d),
            workspace.empty(at_once, num_kv_heads, 2, block_d, rank),
        )  # fmt: skip
        for first_row in range(0, rows.num_rows, at_once):
            num_rows = min(at_once, rows.num_rows - first_row)
            _products_kernel[(PARTS * 2, num_squares * num_kv_heads, num_rows)](
                query_args(q), key_args(cache, rows.block_table), rows.tiles, rows.device_tile_starts,
                rows.device_seq_lens, first_row, sums,
                **shape, GROUP=inputs.group, WIDTH=width, MOST_KEYS=SAMPLED_KEYS, PARTS=PARTS,
                num_warps=8, maxnreg=MAX_REGISTERS if num_squares == 1 else None,
            )  # fmt: skip
            _second_moments_kernel[(block_d // STRIPE.value, num_kv_heads * 2, num_rows)](
                rows.device_seq_lens, first_row, sums, BLOCK_D=block_d, MOST_KEYS=SAMPLED_KEYS, PARTS=PARTS,
                num_warps=4,
            )  # fmt: skip
            _maps_kernel[(num_kv_heads, num_rows)](
                first_row, sums, means, maps, edges, variance_shares, **shape, RANK=rank, ITERATIONS=ITERATIONS,
                num_warps=8,
            )  # fmt: skip


@triton.jit
def sampling_period(seq_len, MOST_KEYS: tl.constexpr):
    """Return the sampling period: every n-th group of keys belongs to the sample, where n is a power of two."""
    period = 1
    while period * MOST_KEYS < seq_len:
        period *= 2
    return period


@triton.jit
def _finite(b_x):
    """Return b_x with 0 for NaN and for elements that are too large for a sum of squares."""
    return tl.where(tl.abs(b_x.to(tl.float32)) < TOO_LARGE, b_x, 0.0).to(b_x.dtype)


@triton.jit(do_not_specialize=["first_row"])
def _products_kernel(
    queries, keys, tiles, tile_starts, seq_lens, first_row, sums,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    MOST_KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up products x xᵀ over a part of the sample of a row and kv head: [WIDTH, WIDTH] of the BLOCK_D² elements.

    Grid: (2 · PARTS, squares · kv heads, rows); the first PARTS programs process keys, and the others queries. Bound
    by memory: it reads the sample once for each square.

    Args:
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
        tile_starts: [num_rows + 1] int32, each row's first tile.
        seq_lens: [num_rows] int32, each row's keys.
    """
    SIDE: tl.constexpr = BLOCK_D // WIDTH
    i_part, i_kv, i_launch_row = tl.program_id(0) % PARTS, tl.program_id(1) // (SIDE * SIDE), tl.program_id(2)
    i_square = tl.program_id(1) % (SIDE * SIDE)
    num_kv_heads = tl.num_programs(1) // (SIDE * SIDE)
    o_a = i_square // SIDE * WIDTH + tl.arange(0, WIDTH)
    o_b = i_square % SIDE * WIDTH + tl.arange(0, WIDTH)
    i_row = first_row + i_launch_row
    o_s = tl.arange(0, GROUP_TOKENS)
    b_products = tl.zeros([WIDTH, WIDTH], tl.float32)
    i_sum = (i_launch_row * num_kv_heads + i_kv).to(tl.int64) * PARTS + i_part
    o_square = i_sum * (BLOCK_D * BLOCK_D) + o_a[:, None] * BLOCK_D + o_b[None, :]
    if tl.program_id(0) < PARTS:
        seq_len = tl.load(seq_lens + i_row)
        stride = sampling_period(seq_len, MOST_KEYS) * GROUP_TOKENS
        table = keys.block_table + tl.cast(i_row, tl.int64) * keys.stride_table
        base = keys.k + i_kv.to(tl.int64) * keys.stride_head
        b_sum = tl.zeros([WIDTH], tl.float32)
        o_n = i_part * stride + o_s
        o_k = key_offsets(table, o_n, o_n < seq_len, keys.page_size, keys.stride_page, keys.stride_token)
        b_a, b_b = _load_sides(base + o_k, o_n < seq_len, o_a, o_b, HEAD_DIM, SIDE)
        for first in range(i_part * stride, seq_len, PARTS * stride):
            o_n = first + PARTS * stride + o_s
            o_k = key_offsets(table, o_n, o_n < seq_len, keys.page_size, keys.stride_page, keys.stride_token)
            b_a_next, b_b_next = _load_sides(base + o_k, o_n < seq_len, o_a, o_b, HEAD_DIM, SIDE)
            b_a, b_b = _finite(b_a), _finite(b_b)
            b_sum += tl.sum(b_b.to(tl.float32), 0)
            b_products = tl.dot(tl.trans(b_a), b_b, b_products, input_precision="ieee")
            b_a, b_b = b_a_next, b_b_next
        tl.store(sums.key_products + o_square, b_products)
        if i_square < SIDE:
            tl.store(sums.key_sums + i_sum * BLOCK_D + o_b, b_sum)
    else:
        begin, end = tl.load(tile_starts + i_row), tl.load(tile_starts + i_row + 1)
        num_queries = _queries_of_tile(end - begin)
        for i_tile in range(begin + i_part, end, PARTS):
            _, token, length, _ = load_tile(tiles, i_tile)
            length = tl.minimum(length, num_queries)
            for i in range(0, GROUP * length, GROUP_TOKENS):
                o_i = i + o_s  # head by head within a token
                at = queries.q + (token + o_i // GROUP).to(tl.int64) * queries.stride_token
                at += (i_kv * GROUP + o_i % GROUP) * queries.stride_head
                b_a, b_b = _load_sides(at, o_i < GROUP * length, o_a, o_b, HEAD_DIM, SIDE)
                b_products = tl.dot(tl.trans(_finite(b_a)), _finite(b_b), b_products, input_precision="ieee")
        tl.store(sums.query_products + o_square, b_products)


@triton.jit
def _load_sides(at, mask, o_a, o_b, HEAD_DIM: tl.constexpr, SIDE: tl.constexpr):
    """Load channels o_a and o_b of the vectors at pointers ``at``: [len(at), WIDTH] each, 0 outside of ``mask``."""
    b_a = widen(tl.load(at[:, None] + o_a[None, :], mask=mask[:, None] & (o_a < HEAD_DIM)[None, :], other=0.0))
    if SIDE == 1:
        return b_a, b_a
    else:
        mask_b = mask[:, None] & (o_b < HEAD_DIM)[None, :]
        return b_a, widen(tl.load(at[:, None] + o_b[None, :], mask=mask_b, other=0.0))


@triton.jit
def _queries_of_tile(num_tiles):
    """Return the number of sampled queries in each tile of a row."""
    return tl.where(num_tiles <= 16, 128, tl.where(num_tiles <= 32, 64, 32))


@triton.jit(do_not_specialize=["first_row"])
def _second_moments_kernel(
    seq_lens, first_row, sums, BLOCK_D: tl.constexpr, MOST_KEYS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Add up the parts of a row and kv head into STRIPE rows of the queries' moment or of the keys' covariance.

    Grid: (stripes, 2 · kv heads, rows); even programs process queries, and odd programs keys. Bound by memory.

    Args:
        seq_lens: [num_rows] int32, each row's keys.
    """
    i_kv, takes_keys, i_launch_row = tl.program_id(1) // 2, tl.program_id(1) % 2, tl.program_id(2)
    num_kv_heads = tl.num_programs(1) // 2
    o_r, o_d = tl.program_id(0) * STRIPE + tl.arange(0, STRIPE), tl.arange(0, BLOCK_D)
    i_row_head = (i_launch_row * num_kv_heads + i_kv).to(tl.int64)
    o_stripe = o_r[:, None] * BLOCK_D + o_d[None, :]
    products = (sums.key_products if takes_keys else sums.query_products) + i_row_head * (PARTS * BLOCK_D * BLOCK_D)
    b_moment = tl.zeros([STRIPE, BLOCK_D], tl.float32)
    for i in range(PARTS):
        b_moment += tl.load(products + i * (BLOCK_D * BLOCK_D) + o_stripe)
    if takes_keys:
        key_sums = sums.key_sums + i_row_head * (PARTS * BLOCK_D)
        b_row, b_mean = tl.zeros([STRIPE], tl.float32), tl.zeros([BLOCK_D], tl.float32)
        for i in range(PARTS):
            b_row += tl.load(key_sums + i * BLOCK_D + o_r)
            b_mean += tl.load(key_sums + i * BLOCK_D + o_d)
        seq_len = tl.load(seq_lens + first_row + i_launch_row)
        stride = sampling_period(seq_len, MOST_KEYS) * GROUP_TOKENS
        count = seq_len // stride * GROUP_TOKENS + tl.minimum(seq_len % stride, GROUP_TOKENS)
        b_row, b_mean = b_row / count, b_mean / count
        b_moment = b_moment / count - b_row[:, None] * b_mean[None, :]
        tl.store(sums.means + i_row_head * BLOCK_D + o_r, b_row)
    moments = sums.moments + (i_row_head * 2 + takes_keys) * (BLOCK_D * BLOCK_D)
    tl.store(moments + o_stripe, b_moment)


@triton.jit(do_not_specialize=["first_row"])
def _maps_kernel(
    first_row, sums, means, maps, edges, variance_shares,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, RANK: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Compute the maps of one row and kv head by orthogonal iteration.

    X and C_q X stay in ``sums.iterates``, in the L1 cache, so that a program holds only a part of them at a time.

    Grid: (kv heads, rows). Bound by latency: RANK dependent steps for each Cholesky factor.

    Args:
        means: [num_rows, kv heads, RANK] float32, of mapped keys; written.
        maps: [num_rows, kv heads, 2, BLOCK_D, RANK]; written.
        edges: [NUM_EDGES] float32, ``share_counts.EDGES``; None without ``variance_shares``.
        variance_shares: [num_rows, SHARE_FIELDS] int64, to which the share of the score variance is added; or None.
    """
    i_kv, i_launch_row = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    i_row_head = (i_launch_row * num_kv_heads + i_kv).to(tl.int64)
    query_moment = sums.moments + i_row_head * (2 * BLOCK_D * BLOCK_D)
    key_moment = query_moment + BLOCK_D * BLOCK_D
    x_map = sums.iterates + i_row_head * (2 * BLOCK_D * RANK)
    w_map = x_map + BLOCK_D * RANK  # C_q X
    o_r, o_d = tl.arange(0, RANK), tl.arange(0, BLOCK_D)
    b_q = tl.load(query_moment + o_d * (BLOCK_D + 1))
    b_k = tl.maximum(tl.load(key_moment + o_d * (BLOCK_D + 1)), 0.0)
    scale_q = BLOCK_D / tl.maximum(tl.sum(b_q, 0), TINY)
    scale_k = BLOCK_D / tl.maximum(tl.sum(b_k, 0), TINY)
    # X begins with the heaviest channels, ties to lower channels: column i has a 1 at the channel of rank i.
    b_weight = tl.where(o_d < HEAD_DIM, (b_q * scale_q) * (b_k * scale_k), -1.0)
    b_before = (b_weight[None, :] == b_weight[:, None]) & (o_d[None, :] < o_d[:, None])
    b_rank = tl.sum(((b_weight[None, :] > b_weight[:, None]) | b_before).to(tl.int32), 1)
    tl.store(x_map + o_d[:, None] * RANK + o_r[None, :], (b_rank[:, None] == o_r[None, :]).to(tl.float32))
    _multiply(x_map, query_moment, scale_q, w_map, BLOCK_D, RANK)
    for i in tl.static_range(ITERATIONS):
        _multiply(w_map, key_moment, scale_k, x_map, BLOCK_D, RANK)
        _multiply(x_map, query_moment, scale_q, w_map, BLOCK_D, RANK)
        b_inverse = _inverse_factor(_gram(x_map, w_map, BLOCK_D, RANK), RANK)
        if i < ITERATIONS - 1:
            # The next iteration computes X from C_q X, so X is not needed here.
            _combine(b_inverse, w_map, sums.means + i_row_head * BLOCK_D, w_map, BLOCK_D, RANK)
        else:
            i_maps = ((first_row + i_launch_row) * num_kv_heads + i_kv).to(tl.int64)
            target = maps + i_maps * (2 * BLOCK_D * RANK)
            mean = sums.means + i_row_head * BLOCK_D
            _combine(b_inverse, x_map, mean, target, BLOCK_D, RANK)
            b_mean = _combine(b_inverse, w_map, mean, target + BLOCK_D * RANK, BLOCK_D, RANK)
            tl.store(means + i_maps * RANK + o_r, b_mean)
            if variance_shares is not None:
                # W = C_q X, unrounded, and C_k W in the memory of X.
                _combine(b_inverse, w_map, mean, w_map, BLOCK_D, RANK)
                _multiply(w_map, key_moment, scale_k, x_map, BLOCK_D, RANK)
                variance = _variance(query_moment, key_moment, scale_q, scale_k, HEAD_DIM, BLOCK_D)
                share = _inner_product(w_map, x_map, BLOCK_D, RANK) / variance
                count_share(share, edges, variance_shares + (first_row + i_launch_row).to(tl.int64) * SHARE_FIELDS)


@triton.jit
def _multiply(x_map, moment, scale, target, BLOCK_D: tl.constexpr, RANK: tl.constexpr):
    """Store (scale · moment + RIDGE) x, where moment is [BLOCK_D, BLOCK_D], and x and the result [BLOCK_D, RANK].

    Barriers at the beginning and the end make x and the result visible to all threads.
    """
    CHUNK: tl.constexpr = 16 if BLOCK_D > 128 else 32
    o_r, o_d, o_i = tl.arange(0, RANK), tl.arange(0, BLOCK_D), tl.arange(0, CHUNK)
    b_y = tl.zeros([RANK, BLOCK_D], tl.float32)
    tl.debug_barrier()
    for first in range(0, BLOCK_D, CHUNK):
        b_x = tl.load(x_map + (first + o_i)[None, :] * RANK + o_r[:, None])
        b_c = tl.load(moment + (first + o_i)[:, None] * BLOCK_D + o_d[None, :]) * scale
        b_c += tl.where((first + o_i)[:, None] == o_d[None, :], RIDGE, 0.0)
        b_y = tl.dot(b_x, b_c, b_y, input_precision="tf32x3")
    tl.store(target + o_d[None, :] * RANK + o_r[:, None], b_y)
    tl.debug_barrier()


@triton.jit
def _variance(query_moment, key_moment, scale_q, scale_k, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the trace of the product of both moments, [BLOCK_D, BLOCK_D] each, as ``_multiply`` reads them."""
    CHUNK: tl.constexpr = 16
    o_d, o_i = tl.arange(0, BLOCK_D), tl.arange(0, CHUNK)
    b_sum = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, BLOCK_D, CHUNK):
        at = (first + o_i)[:, None] * BLOCK_D + o_d[None, :]
        b_ridge = tl.where(((first + o_i)[:, None] == o_d[None, :]) & (o_d[None, :] < HEAD_DIM), RIDGE, 0.0)
        b_q = tl.load(query_moment + at) * scale_q + b_ridge
        b_k = tl.load(key_moment + at) * scale_k + b_ridge
        b_sum += tl.sum(b_q * b_k, 0)
    return tl.sum(b_sum, 0)


@triton.jit
def _inner_product(x_map, w_map, BLOCK_D: tl.constexpr, RANK: tl.constexpr):
    """Return the trace of xᵀ w, where x and w are [BLOCK_D, RANK]."""
    CHUNK: tl.constexpr = 32
    o_r, o_i = tl.arange(0, RANK), tl.arange(0, CHUNK)
    b_sum = tl.zeros([RANK], tl.float32)
    for first in range(0, BLOCK_D, CHUNK):
        at = (first + o_i)[:, None] * RANK + o_r[None, :]
        b_sum += tl.sum(tl.load(x_map + at) * tl.load(w_map + at), 0)
    return tl.sum(b_sum, 0)


@triton.jit
def _gram(x_map, w_map, BLOCK_D: tl.constexpr, RANK: tl.constexpr):
    """Return xᵀ w as [RANK, RANK], where x and w are [BLOCK_D, RANK]."""
    CHUNK: tl.constexpr = 32
    o_r, o_i = tl.arange(0, RANK), tl.arange(0, CHUNK)
    b_g = tl.zeros([RANK, RANK], tl.float32)
    for first in range(0, BLOCK_D, CHUNK):
        b_x = tl.load(x_map + (first + o_i)[None, :] * RANK + o_r[:, None])
        b_w = tl.load(w_map + (first + o_i)[:, None] * RANK + o_r[None, :])
        b_g = tl.dot(b_x, b_w, b_g, input_precision="tf32x3")
    return b_g


@triton.jit
def _combine(b_inverse, x_map, mean, target, BLOCK_D: tl.constexpr, RANK: tl.constexpr):
    """Store x [BLOCK_D, RANK] times the transpose of b_inverse [RANK, RANK]; ``target`` may be x.

    Return the product of the vector ``mean`` [BLOCK_D] with the rounded values that were stored: [RANK] float32.
    """
    CHUNK: tl.constexpr = 64
    o_r, o_i = tl.arange(0, RANK), tl.arange(0, CHUNK)
    b_mean = tl.zeros([RANK], tl.float32)
    for first in range(0, BLOCK_D, CHUNK):
        at = (first + o_i)[None, :] * RANK + o_r[:, None]
        b_x = tl.dot(b_inverse, tl.load(x_map + at), input_precision="tf32x3").to(target.dtype.element_ty)
        b_mean += tl.sum(b_x.to(tl.float32) * tl.load(mean + first + o_i)[None, :], 1)
        tl.debug_barrier()
        tl.store(target + at, b_x)
    tl.debug_barrier()
    return b_mean


@triton.jit
def _inverse_factor(b_g, RANK: tl.constexpr):
    """Compute by elimination the inverse of the Cholesky factor L of a symmetric matrix G = L Lᵀ [RANK, RANK]."""
    o_r, o_c = tl.arange(0, RANK), tl.arange(0, 2 * RANK)
    b_unit = (o_r[:, None] == o_r[None, :]).to(tl.float32)
    b_row_scale = tl.rsqrt(tl.maximum(tl.sum(b_unit * b_g, 1), TINY))
    b_column_scale = tl.rsqrt(tl.maximum(tl.sum(b_unit * b_g, 0), TINY))  # the same numbers
    b_g = b_g * b_row_scale[:, None] * b_column_scale[None, :] + JITTER * b_unit
    # Eliminate in [G | 1], row by row, until the left half is upper triangular. Columns without a pivot are left out.
    b_a = tl.reshape(tl.permute(tl.join(b_g, b_unit), (0, 2, 1)), [RANK, 2 * RANK])
    b_pivots = tl.zeros([RANK], tl.float32)
    for j in range(RANK):
        b_row = tl.sum(tl.where(o_r[:, None] == j, b_a, 0.0), 0)
        b_column = tl.sum(tl.where(o_c[None, :] == j, b_a, 0.0), 1)
        diagonal = tl.sum(tl.where(o_c == j, b_row, 0.0), 0)
        pivot = tl.where(diagonal > LEAST_PIVOT, 1.0 / tl.maximum(diagonal, LEAST_PIVOT), 0.0)
        b_a -= tl.where(o_r > j, b_column * pivot, 0.0)[:, None] * b_row[None, :]
        b_pivots = tl.where(o_r == j, tl.sqrt(pivot), b_pivots)
    _, b_right = tl.split(tl.permute(tl.reshape(b_a, [RANK, 2, RANK]), (0, 2, 1)))
    return b_right * b_pivots[:, None] * b_column_scale[None, :]
