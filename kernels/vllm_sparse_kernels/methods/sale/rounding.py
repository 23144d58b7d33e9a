# SPDX-License-Identifier: Apache-2.0
"""SALE's first two steps: queries and keys in 4 bits, and every query's threshold. ``method.py`` cites the paper.

Each kernel handles all rows of a step in a single launch, except keys, which are rounded a slab of rows at a time
(``selection/slabs.py``). The results for a row depend only on that row.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.compile_time import LN_2, LOG2_E, Constant
from vllm_sparse_kernels.methods.sale.means import Means
from vllm_sparse_kernels.online_softmax import add_exponentials
from vllm_sparse_kernels.paged import KeySource, load_keys, load_queries, query_args, widen
from vllm_sparse_kernels.rows import TILE, TILE_TOKENS
from vllm_sparse_kernels.selection.lists import load_tile
from vllm_sparse_kernels.selection.slabs import STEP_TOKENS, KeySlab, padded
from vllm_sparse_kernels.vectors import load_vector, vector_pointers

QUERY_BLOCK = Constant(64)  # b_q
KEY_BLOCK = Constant(32)  # b_k
SEGMENT = Constant(128)  # keys between sink and local region: a multiple of four 32-key blocks
LEVELS = Constant(7.0)
TINY = Constant(1e-20)  # stands in for the largest magnitude of a vector of zeros

BLOCK_N = Constant(64)
"""Keys of one program that rounds keys, and of one step of a program that rounds queries."""


class RoundedQueries(NamedTuple):
    """Queries in 4 bits, tile after tile.

    Integers are int8 or e4m3. A score is a product of integers times the scales of its query and its key. Parts of
    heads that keep everything are undefined.
    """

    integers: Any  # [num_selected, num_queries, BLOCK_D]
    thresholds: Any  # [num_selected, num_queries] float32, divided by the query's scale; infinity past the row's end
    inverse_scales: Any  # [num_selected, num_queries] float32, 0 past the row's end
    squares: Any  # [num_selected, num_queries] float32, of the integers' length
    num_queries: int  # whole tiles


class RoundedKeys(NamedTuple):
    """Keys of a slab in 4 bits. Parts of kv heads that no estimating head reads are undefined."""

    integers: Any  # [num_kv_heads, num_keys, BLOCK_D]
    scales: Any  # [num_kv_heads, num_keys / 8] float32
    biases: Any  # [num_selected, num_keys] float32, q̄(k − k̄)ᵀ divided by the key's scale
    half_biases: Any  # the same in half precision, infinite if they are out of its range
    squares: Any  # [num_kv_heads, num_keys / 64] float32, largest squared length of 64 keys' integers
    largest_biases: Any  # [num_selected, num_keys / 64] float32, largest magnitude among the biases of 64 keys
    num_keys: int  # a multiple of 128


def round_keys(call: Call, means: Means, slab: KeySlab, dtype: torch.dtype) -> RoundedKeys:
    """Round the keys of a slab's rows to 4 bits, in whole steps; keys past a row's end count as zeros."""
    cache, rows, empty = call.cache, call.rows, call.workspace.empty
    num_selected, num_keys, block_d = call.num_selected, slab.num_keys, means.keys.shape[2]
    rounded = RoundedKeys(
        integers=empty(cache.num_kv_heads, num_keys, block_d, dtype=dtype),
        scales=empty(cache.num_kv_heads, num_keys // 8),
        biases=empty(num_selected, num_keys),
        half_biases=empty(num_selected, num_keys, dtype=torch.float16),
        squares=empty(cache.num_kv_heads, num_keys // 64),
        largest_biases=empty(num_selected, num_keys // 64),
        num_keys=num_keys,
    )
    num_programs = padded(slab.longest) // BLOCK_N.value
    _round_keys_kernel[(num_programs, cache.num_kv_heads, len(slab.key_starts))](
        call.key_args, rounded, means, call.head_ids, call.parameters("log_tau"), num_selected,
        rows.device_seq_lens, slab.first_row, slab.key_starts,
        HEAD_DIM=cache.head_dim, BLOCK_D=block_d, GROUP=call.group, GROUP_2=triton.next_power_of_2(call.group),
        HEADS=triton.next_power_of_2(num_selected), num_warps=4,
    )  # fmt: skip
    return rounded


def round_queries(call: Call, means: Means, dtype: torch.dtype) -> RoundedQueries:
    """Round the queries of all rows to 4 bits, and compute every query's threshold."""
    q, cache, rows, empty = call.q, call.cache, call.rows, call.workspace.empty
    count, num_queries, block_d = call.num_selected, rows.num_tiles * TILE_TOKENS, means.keys.shape[2]
    rounded = RoundedQueries(
        integers=empty(count, num_queries, block_d, dtype=dtype),
        thresholds=empty(count, num_queries),
        inverse_scales=empty(count, num_queries),
        squares=empty(count, num_queries),
        num_queries=num_queries,
    )
    # Four stages: two for the keys, and two more for the pages that locate them.
    _round_queries_kernel[(num_queries // QUERY_BLOCK.value, count)](
        query_args(q), call.key_args, rounded, means, call.head_ids, call.parameters("log_tau"),
        rows.tiles, call.method.sink_tokens, call.method.local_tokens, call.scale,
        HEAD_DIM=cache.head_dim, BLOCK_D=block_d, GROUP=call.group, KV_HEADS=cache.num_kv_heads,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return rounded


@triton.jit(do_not_specialize=["num_selected", "first_row"])
def _round_keys_kernel(
    keys, rounded, means, heads, log_taus, num_selected, seq_lens, first_row, key_starts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, GROUP_2: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Run step 1 for BLOCK_N keys of one kv head, and compute q̄(k − k̄)ᵀ for the estimating heads that read them.

    Grid: (keys of the longest row / BLOCK_N, kv heads, rows of the slab). Bound by memory: it reads each key once.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
        log_taus: [n] float32, ln τ; −∞ for heads that keep everything.
        seq_lens: [num_rows] int32, each row's keys.
        key_starts: [rows of the slab] int32, where a row's keys begin: multiples of 128.
    """
    i_kv = tl.program_id(1)
    i_row = first_row + tl.program_id(2)
    seq_len = tl.load(seq_lens + i_row)
    first = tl.program_id(0) * BLOCK_N
    # The place in ``heads`` of each query head of the kv head, and whether such a head is tested at all.
    o_h = tl.arange(0, HEADS)
    o_g = tl.arange(0, GROUP_2)
    b_heads = tl.load(heads + o_h, mask=o_h < num_selected, other=-1)
    b_tests = tl.load(log_taus + o_h, mask=o_h < num_selected, other=float("-inf")) > float("-inf")
    b_matches = (b_heads[None, :] == (i_kv * GROUP + o_g)[:, None]) & b_tests[None, :] & (o_g < GROUP)[:, None]
    b_tested = tl.sum(b_matches.to(tl.int32), 1) > 0
    if (first < tl.cdiv(seq_len, STEP_TOKENS) * STEP_TOKENS) & (tl.sum(b_tested.to(tl.int32), 0) > 0):
        o_n = first + tl.arange(0, BLOCK_N)
        slot = tl.load(key_starts + tl.program_id(2)) + first
        b_k = widen(load_keys(keys, i_row, i_kv, o_n, seq_len, HEAD_DIM, BLOCK_D))
        i_mean = i_row * tl.num_programs(1) + i_kv
        b_mean = load_vector(means.keys, i_mean, BLOCK_D)
        b_bias = _biases(b_k, b_mean, means.queries, i_mean, GROUP, GROUP_2)
        b_bias = tl.where((o_n < seq_len)[:, None], b_bias, 0.0)
        b_k = tl.where((o_n < seq_len)[:, None], b_k.to(tl.float32) - b_mean[None, :], 0.0)

        b_largest = tl.reshape(tl.max(tl.abs(b_k), 1), [BLOCK_N // 32, 4, 4, 2])
        b_scale = tl.maximum(tl.max(tl.max(b_largest, 3), 1), TINY) / LEVELS
        o_kv = i_kv.to(tl.int64) * rounded.num_keys + slot
        tl.store(rounded.scales + o_kv // 8 + tl.arange(0, BLOCK_N // 8), tl.reshape(b_scale, [BLOCK_N // 8]))
        b_inverse = tl.broadcast_to((1.0 / b_scale)[:, None, :, None], [BLOCK_N // 32, 4, 4, 2])
        b_inverse = tl.reshape(b_inverse, [BLOCK_N])
        b_int = tl.floor(b_k * b_inverse[:, None] + 0.5)
        integers = vector_pointers(rounded.integers, o_kv + tl.arange(0, BLOCK_N), BLOCK_D)
        tl.store(integers, b_int.to(rounded.integers.dtype.element_ty))
        tl.store(rounded.squares + o_kv // BLOCK_N, tl.max(tl.sum(b_int * b_int, 1), 0))

        b_bias = b_bias * b_inverse[:, None]
        b_first_bias = tl.sum(tl.where(b_matches, o_h[None, :], 0), 1).to(tl.int64) * rounded.num_keys + slot
        o_bias = b_first_bias[None, :] + tl.arange(0, BLOCK_N)[:, None]
        tl.store(rounded.biases + o_bias, b_bias, mask=b_tested[None, :])
        tl.store(rounded.half_biases + o_bias, b_bias.to(tl.float16), mask=b_tested[None, :])
        tl.store(rounded.largest_biases + b_first_bias // BLOCK_N, tl.max(tl.abs(b_bias), 0), mask=b_tested)


@triton.jit
def _biases(b_k, b_mean, query_means, i_kv, GROUP: tl.constexpr, GROUP_2: tl.constexpr):
    """Compute q̄(k − k̄)ᵀ of the kv head's query heads, [BLOCK_N, GROUP_2] float32, as q̄kᵀ − q̄k̄ᵀ.

    q̄kᵀ is one matrix product. It splits q̄ into up to three parts in the keys' type, which add up to q̄ in float32.
    """
    PARTS: tl.constexpr = 4 if GROUP_2 >= 4 else 16 // GROUP_2  # of which the first three are not zero
    o_c = tl.arange(0, GROUP_2 * PARTS)
    o_d = tl.arange(0, b_k.shape[1])
    o_q = (i_kv * GROUP + o_c // PARTS)[None, :] * b_k.shape[1] + o_d[:, None]
    b_q = tl.load(query_means + o_q, mask=(o_c // PARTS < GROUP)[None, :], other=0.0)
    b_base = tl.max(tl.reshape(tl.sum(b_q * b_mean[:, None], 0), [GROUP_2, PARTS]), 1)  # PARTS equal numbers
    b_high = b_q.to(b_k.dtype)
    b_middle = (b_q - b_high.to(tl.float32)).to(b_k.dtype)
    b_low = (b_q - b_high.to(tl.float32) - b_middle.to(tl.float32)).to(b_k.dtype)
    b_part = (o_c % PARTS)[None, :]
    b_last = tl.where(b_part == 2, b_low, tl.zeros_like(b_low))
    b_parts = tl.where(b_part == 0, b_high, tl.where(b_part == 1, b_middle, b_last))
    b_s = tl.dot(b_k, b_parts, input_precision="ieee")
    return tl.sum(tl.reshape(b_s, [b_k.shape[0], GROUP_2, PARTS]), 2) - b_base[None, :]


@triton.jit
def local_start(end, sink_tokens, local_tokens):
    """Return the start of the local region of a 64-query block."""
    between = tl.cdiv(end, KEY_BLOCK) * KEY_BLOCK - sink_tokens - local_tokens
    return tl.where(between >= 0, sink_tokens + between // SEGMENT * SEGMENT, 0)


@triton.jit
def _round_queries_kernel(
    queries, keys, rounded, means, heads, log_taus, tiles, sink_tokens, local_tokens, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Run steps 1 and 2 for 64 queries of one head.

    Grid: (query blocks of 64, n). Bound by the matrix units, which multiply queries with keys of sink and local region.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
        log_taus: [n] float32, ln τ; −∞ for heads that keep everything.
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
    """
    i_selected = tl.program_id(1)
    log_tau = tl.load(log_taus + i_selected)
    if log_tau > float("-inf"):
        i_head = tl.load(heads + i_selected)
        i_row, token, length, position = load_tile(tiles, tl.program_id(0) // (TILE // QUERY_BLOCK))
        first = tl.program_id(0) % (TILE // QUERY_BLOCK) * QUERY_BLOCK
        num_queries, position = length - first, position + first
        o_m = tl.arange(0, QUERY_BLOCK)
        in_row = o_m < num_queries
        b_q = load_queries(queries, i_head, token + first, num_queries, QUERY_BLOCK, HEAD_DIM, BLOCK_D)
        i_kv = i_head // GROUP
        end = position + tl.minimum(num_queries, QUERY_BLOCK)
        begin = local_start(end, sink_tokens, local_tokens)
        source = KeySource(keys, i_row, i_kv, end)
        b_lse = _local_lse(b_q, position + o_m, source, begin, sink_tokens, scale, HEAD_DIM)
        b_q = b_q.to(tl.float32)

        i_mean = i_row * KV_HEADS + i_kv
        b_mean = load_vector(means.keys, i_mean, BLOCK_D)
        b_threshold = (log_tau + b_lse) / scale - tl.sum(b_q * b_mean[None, :], 1)
        i_query_mean = i_row * KV_HEADS * GROUP + i_head
        b_mean = load_vector(means.queries, i_query_mean, BLOCK_D)
        b_q = tl.where(in_row[:, None], b_q - b_mean[None, :], 0.0)
        b_scale = tl.maximum(tl.max(tl.abs(b_q), 1), TINY) / LEVELS
        b_int = tl.floor(b_q * (1.0 / b_scale)[:, None] + 0.5)
        o_r = i_selected.to(tl.int64) * rounded.num_queries + tl.program_id(0) * QUERY_BLOCK + o_m
        tl.store(vector_pointers(rounded.integers, o_r, BLOCK_D), b_int.to(rounded.integers.dtype.element_ty))
        tl.store(rounded.squares + o_r, tl.sum(b_int * b_int, 1))
        tl.store(rounded.thresholds + o_r, tl.where(in_row, b_threshold / b_scale, float("inf")))
        tl.store(rounded.inverse_scales + o_r, tl.where(in_row, 1.0 / b_scale, 0.0))


@triton.jit
def _local_lse(b_q, o_m, source, local, sink_tokens, scale, HEAD_DIM: tl.constexpr):
    """Compute ln l̃ + m̃ of each query over the sink, and the local region from ``local`` to the keys' end: [64]."""
    end = source.end
    begin = local // BLOCK_N * BLOCK_N
    sink_steps = tl.cdiv(tl.minimum(sink_tokens, begin), BLOCK_N)
    local_steps = tl.cdiv(end - begin, BLOCK_N)
    b_max = tl.full([b_q.shape[0]], float("-inf"), tl.float32)
    b_sum = tl.zeros([b_q.shape[0]], tl.float32)
    for i in range(sink_steps + local_steps):
        o_n = tl.where(i < sink_steps, i * BLOCK_N, begin + (i - sink_steps) * BLOCK_N) + tl.arange(0, BLOCK_N)
        b_k = load_keys(source.keys, source.i_row, source.i_kv, o_n, end, HEAD_DIM, b_q.shape[1])
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * (scale * LOG2_E)
        seen = (o_n < sink_tokens) | (o_n >= local)
        b_s = tl.where(seen[None, :] & (o_n[None, :] <= o_m[:, None]), b_s, float("-inf"))
        b_max, b_sum = add_exponentials(b_max, b_sum, b_s)
    return (b_max + tl.log2(b_sum)) * LN_2
