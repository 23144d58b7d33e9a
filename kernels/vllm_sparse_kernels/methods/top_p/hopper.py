# SPDX-License-Identifier: Apache-2.0
"""Masses of blocks on Hopper: three launches for a run of tiles.

1. ``_own_kernel``, each tile and the keys that some of its queries may not see: the only masks. Of each query what all
   its scores are measured against (``tops``), and the sum of exponentials over those keys' blocks.
2. ``_scores_kernel``, in Gluon, all keys before: one maximum per query and block, one exponential, one byte. A warp
   group holds the scores of two tiles. While it looks at those of one, the matrix units multiply the other's.
3. ``_masses_kernel``: bytes back into numbers, over each query's own sum, and the mean over the tile's queries.

Keys lie permuted within steps of 128 (``rounding.py``): all scores of a query and block then lie in one thread, and a
maximum costs one instruction for two scores. Products are added up in half precision, which loses 2^-11 of a sum.

A byte has six bits of exponent and two of mantissa: from 2^-40 to 2^23 of what its query's scores are measured against,
the largest one near the query and among the first 128 keys. Rounding is by up to a ninth, and what sums it up does so
over 128 queries. Bytes of [128 queries, 16 blocks] lie together, a query's after each other; its 16 in four words by
the block's place in its step, where each thread of the matrix product has one.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.gluon_names import (
    TensorDescriptor,
    barrier,
    bulk_load,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from vllm_sparse_kernels.methods.top_p.slabs import Rounded
from vllm_sparse_kernels.rows import TILE_FIELDS, ceil_div
from vllm_sparse_kernels.workspace import Workspace

STAGES = gl.constexpr(4)
"""Steps of keys in shared memory, and of one round of the loop: as many as a word has bytes."""

STEP = gl.constexpr(128)
"""Keys of one step, and queries of a tile."""

ROUND = gl.constexpr(512)
"""Keys of one round: the 16 blocks whose bytes lie together."""

SPAN_TOKENS = 8192
"""Keys of one program: enough that its start does not show, few enough to fill a card."""

PAIR_FIELDS = gl.constexpr(3)

PERMUTED = True
"""Keys lie permuted within steps."""

WIDEST = 256
"""Channels up to which a program's queries and keys fit shared memory."""

MASS_ROUNDS = 64
"""Rounds of one program of ``_masses_kernel``."""


class Scratch(NamedTuple):
    """What the launches leave each other."""

    tops: Any  # [num_selected, num_tiles, 128] float32
    own: Any  # [num_selected, num_tiles, 128] float32, sums over the tile's own keys
    parts: Any  # [num_selected, num_tiles, num_spans, 128] float32, sums over the keys of spans
    bytes: Any  # [num_selected, num_tiles, num_rounds, 128, 4] int32


def scratch_bytes(num_selected: int, last_position: int) -> int:
    """What one tile whose queries end at ``last_position`` takes."""
    return num_selected * (ceil_div(last_position, ROUND.value) * ROUND.value * 4 + 4096)


def room(num_selected: int, num_tiles: int, last_position: int, workspace: Workspace) -> Scratch:
    spans, rounds = ceil_div(last_position, SPAN_TOKENS), ceil_div(last_position, ROUND.value)
    return Scratch(
        workspace.empty(num_selected, num_tiles, 128), workspace.empty(num_selected, num_tiles, 128),
        workspace.empty(num_selected, num_tiles, max(spans, 1), 128),
        workspace.empty(num_selected, num_tiles, max(rounds, 1), 128, 4, dtype=torch.int32),
    )  # fmt: skip


def masses(
    rounded: Rounded, heads: torch.Tensor, kept: torch.Tensor, group: int, tiles: torch.Tensor, first_tile: int,
    pairs: torch.Tensor, scratch: Scratch, target: torch.Tensor,
) -> None:  # fmt: skip
    """Mean over each tile's queries of their share in each block: ``target`` [num_selected, num_tiles, width] float32.

    The mass of all the tile's own keys stands at the first of their blocks, 0 at the others. Not written: what lies
    past the tile's causal blocks, and heads whose ``kept`` is 1 or more.
    """
    num_selected, num_pairs, kept_d = len(heads), len(pairs), rounded.keys.shape[2]
    num_tiles, num_spans, num_rounds = scratch.bytes.shape[1], scratch.parts.shape[2], scratch.bytes.shape[2]
    _own_kernel[(num_pairs, 2, num_selected)](
        rounded, heads, kept, tiles, first_tile, pairs, scratch, num_tiles,
        GROUP=group, KEPT_D=kept_d, FIELDS=TILE_FIELDS, PAIR=PAIR_FIELDS.value, num_warps=8,
    )  # fmt: skip
    _scores_kernel[(num_pairs, num_spans, num_selected)](
        rounded, bulk(rounded.queries, 2 * STEP.value), bulk(rounded.keys, STEP.value), heads, kept, tiles, first_tile, pairs, scratch,
        num_tiles, num_spans, num_rounds, GROUP=group, KEPT_D=kept_d, SPAN=SPAN_TOKENS, FIELDS=TILE_FIELDS, num_warps=8, maxnreg=128,
    )  # fmt: skip
    _masses_kernel[(ceil_div(num_rounds, MASS_ROUNDS), num_tiles, num_selected)](
        kept, tiles, first_tile, scratch, num_tiles, num_spans, num_rounds, target, target.stride(0), target.stride(1),
        SPAN=SPAN_TOKENS, ROUNDS=MASS_ROUNDS, FIELDS=TILE_FIELDS, num_warps=4,
    )  # fmt: skip


def bulk(vectors: torch.Tensor, count: int) -> TensorDescriptor:
    """For copies of ``count`` vectors of [heads, n, KEPT_D]."""
    rows = vectors.flatten(0, 1)
    block = [count, rows.shape[1]]
    return TensorDescriptor.from_tensor(rows, block, gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv))


@triton.jit(do_not_specialize=["first_tile", "num_tiles"])
def _own_kernel(
    rounded, heads, kept, tiles, first_tile, pairs, scratch, num_tiles,
    GROUP: tl.constexpr, KEPT_D: tl.constexpr, FIELDS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """One tile and head: the keys of the step that its first query stands in, and of those behind."""
    i_entry = tl.program_id(2)
    pair = pairs + tl.program_id(0) * PAIR
    i_tile = tl.load(pair) + tl.program_id(1)
    if (tl.program_id(1) < tl.load(pair + 1)) & (tl.load(kept + i_entry) < 1):
        length = tl.load(tiles + i_tile * FIELDS + 2)
        position = tl.load(tiles + i_tile * FIELDS + 3)
        o_m = tl.arange(0, 128)
        o_d = tl.arange(0, KEPT_D)
        o_q = i_entry.to(tl.int64) * rounded.num_queries + i_tile * 128 + o_m
        b_q = tl.load(rounded.queries + o_q[:, None] * KEPT_D + o_d[None, :]).to(tl.float16)
        b_factor = tl.load(rounded.factors + o_q)
        first_key = (tl.load(heads + i_entry) // GROUP).to(tl.int64) * rounded.num_keys + tl.load(pair + 2)
        own = position // 128
        num_own = (position + length - 1) // 128 - own + 1
        b_top = tl.full([128], float("-inf"), tl.float32)
        b_sum = tl.zeros([128], tl.float32)
        # The first step, the one before the tile's own, then those.
        for i in range(tl.where(own == 0, 2, 0), num_own + 2):
            i_step = tl.where(i == 0, 0, own + i - 2)
            b_u = _step_maxima(rounded, first_key + i_step * 128, b_q, b_factor, position + o_m - i_step * 128, KEPT_D)
            b_new = tl.maximum(b_top, tl.max(b_u, 1))
            b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_sum = b_sum * tl.exp2(b_top - b_finite)
            if i >= 2:
                b_sum += tl.sum(tl.exp2(b_u - b_finite[:, None]), 1)
            b_top = b_new
        o_t = (i_entry * num_tiles + i_tile - first_tile) * 128 + o_m
        tl.store(scratch.tops + o_t, b_top)
        tl.store(scratch.own + o_t, b_sum)


@triton.jit
def _step_maxima(rounded, first, b_q, b_factor, b_last, KEPT_D: tl.constexpr):
    """[128, 4]: of each query and block of the step that begins at key ``first`` of all heads' the largest score.

    ``b_last``: each query's last key, counted from there.
    """
    o_n = tl.arange(0, 128)
    o_d = tl.arange(0, KEPT_D)
    b_k = tl.load(rounded.keys + (first + o_n)[:, None] * KEPT_D + o_d[None, :]).to(tl.float16)
    b_step = tl.load(rounded.steps + first // 32 + tl.arange(0, 4))
    b_s = tl.dot(b_q, tl.trans(b_k))
    o_key = o_n // 2 % 4 * 32 + o_n // 8 * 2 + o_n % 2  # which key stands at a slot
    b_s = tl.where(o_key[None, :] <= b_last[:, None], b_s, float("-inf"))
    b_s = tl.max(tl.max(tl.reshape(b_s, [128, 16, 4, 2]), 3), 1)
    # Past the row's end factors are 0, and 0 times minus infinity would not be a number.
    return tl.where(b_s == float("-inf"), b_s, b_s * (b_factor[:, None] * b_step[None, :]))


@gluon.jit
def _larger_pairs(b_a, b_b):
    """Maximum in half precision, two elements in one instruction."""
    return gl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [b_a, b_b], gl.float16, is_pure=True, pack=2)


@gluon.jit
def _larger_half(b_x):
    """Of the elements along the last axis, two by two."""
    b_a, b_b = b_x.split()
    return _larger_pairs(b_a, b_b)


@gluon.jit
def _block_maxima(b_s):
    """[queries, 4] float32: the largest score of each block. One thread has them all."""
    b_s = b_s.reshape([b_s.shape[0], 2, 2, 2, 2, 4, 2]).permute((0, 5, 6, 1, 2, 3, 4))
    b_even, b_odd = _larger_half(_larger_half(_larger_half(_larger_half(b_s)))).split()
    return gl.maximum(b_even, b_odd).to(gl.float32)


@gluon.jit(do_not_specialize=["first_tile", "num_tiles", "num_spans", "num_rounds"])
def _scores_kernel(
    rounded, bulk_queries, bulk_keys, heads, kept, tiles, first_tile, pairs, scratch, num_tiles, num_spans, num_rounds,
    GROUP: gl.constexpr, KEPT_D: gl.constexpr, SPAN: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Two tiles of one head and one span of keys that all of their queries may see."""
    i_span, i_entry = gl.program_id(1), gl.program_id(2)
    pair = pairs + gl.program_id(0) * PAIR_FIELDS
    i_tile = gl.load(pair)
    num_pair = gl.load(pair + 1)
    first_step = i_span * (SPAN // STEP)
    stop_a = gl.load(tiles + i_tile * FIELDS + 3) // STEP - first_step
    stop_b = gl.load(tiles + (i_tile + num_pair - 1) * FIELDS + 3) // STEP - first_step
    num_steps = gl.minimum(stop_b, SPAN // STEP)
    if (num_steps > 0) & (gl.load(kept + i_entry) < 1):
        i_kv = gl.load(heads + i_entry) // GROUP
        key = i_kv * rounded.num_keys + gl.multiple_of(gl.load(pair + 2), STEP) + first_step * STEP
        place = i_entry * num_tiles + i_tile - first_tile
        queries = (i_entry, i_tile, num_pair, place)
        _look_through(
            rounded, bulk_queries, bulk_keys, scratch, num_spans, num_rounds, queries, key, num_steps, stop_a, i_span,
            SPAN, KEPT_D,
        )  # fmt: skip


@gluon.jit
def _look_through(
    rounded, bulk_queries, bulk_keys, scratch, num_spans, num_rounds, queries, key, num_steps, stop_a, i_span,
    SPAN: gl.constexpr, KEPT_D: gl.constexpr,
):  # fmt: skip
    """``stop_a``: steps that the first tile's queries may see, one fewer than the second one's."""
    i_entry, i_tile, num_pair, place = queries
    N: gl.constexpr = STEP
    M: gl.constexpr = 2 * STEP
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 32])
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, KEPT_D], gl.float8e4nv)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, KEPT_D], gl.float8e4nv)
    q_shared = gl.allocate_shared_memory(gl.float8e4nv, [M, KEPT_D], q_layout)
    k_shared = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, N, KEPT_D], k_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    barrier()
    q_ready = ready.index(STAGES)
    mbarrier.expect(q_ready, M * KEPT_D)
    bulk_load(bulk_queries, [(i_entry * rounded.num_queries + i_tile * N).to(gl.int32), 0], q_ready, q_shared)
    key = key.to(gl.int32)
    for i in gl.static_range(STAGES):
        mbarrier.expect(ready.index(i), N * KEPT_D, pred=i < num_steps)
        bulk_load(bulk_keys, [key + i * N, 0], ready.index(i), k_shared.index(i), pred=i < num_steps)

    zero = gl.zeros([M, N], gl.float16, mma)
    # The layout in which maxima come out, found on a tile of zeros that is never computed.
    found: gl.constexpr = _block_maxima(zero).type.layout
    o_m = gl.arange(0, M, gl.SliceLayout(1, found))
    o_t = gl.arange(0, 4, gl.SliceLayout(0, found))
    there = o_m < num_pair * N
    b_factor = gl.load(rounded.factors + i_entry.to(gl.int64) * rounded.num_queries + i_tile * N + o_m, there, 0.0)
    b_top = gl.load(scratch.tops + place * N + o_m, there, 0.0)
    b_sum = gl.zeros([M, 4], gl.float32, found)
    b_word = gl.zeros([M, 4], gl.int32, found)
    o_word = ((o_m // N).to(gl.int64) * num_rounds * (N * 4) + o_m % N * 4)[:, None] + o_t[None, :]
    words = scratch.bytes + (place.to(gl.int64) * num_rounds + i_span * (SPAN // ROUND)) * (N * 4) + o_word
    steps = rounded.steps + key // 32 + o_t
    b_step = gl.load(steps)

    mbarrier.wait(q_ready, 0)
    for i in range(num_steps):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        token = warpgroup_mma(q_shared, k_shared.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        b_next = gl.load(steps + gl.minimum(i + 1, num_steps - 1) * 4)
        b_s = warpgroup_mma_wait(0, deps=(token,))
        barrier()
        more = i + STAGES < num_steps
        mbarrier.expect(ready.index(stage), N * KEPT_D, pred=more)
        bulk_load(bulk_keys, [key + (i + STAGES) * N, 0], ready.index(stage), k_shared.index(stage), pred=more)
        b_x = gl.exp2(_block_maxima(b_s) * (b_factor[:, None] * b_step[None, :]) - b_top[:, None])
        b_x = gl.minimum(gl.maximum(b_x, 2.0**-40), 1.75 * 2.0**23)  # numbers, whatever was multiplied
        b_sum = gl.where((o_m < gl.where(i < stop_a, 0, N))[:, None], b_sum, b_sum + b_x)
        b_word = _append_byte(b_word, b_x)
        if (i % 4 == 3) | (i + 1 == num_steps):
            sees = there & (o_m >= gl.where(i // 4 * 4 < stop_a, 0, N))
            gl.store(words + i // 4 * (N * 4), b_word >> (24 - i % 4 * 8), mask=sees[:, None])
        b_step = b_next
    part = scratch.parts + (place + o_m // N) * num_spans * N + i_span * N + o_m % N
    gl.store(part, gl.sum(b_sum, 1), mask=there & (o_m >= gl.where(stop_a > 0, 0, N)))


@gluon.jit
def _append_byte(b_word, b_x):
    """Words moved down by a byte, with six bits of exponent and two of mantissa, to nearest, in the highest one."""
    b_bits = (b_x.to(gl.int32, bitcast=True) << 3) - 1535115264  # (bits + 2^20 - 87 · 2^23) · 8
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7321;", "=r,r,r", [b_word, b_bits], gl.int32, is_pure=True, pack=1
    )


@gluon.jit(do_not_specialize=["first_tile", "num_tiles", "num_spans", "num_rounds", "stride_head", "stride_tile"])
def _masses_kernel(
    kept, tiles, first_tile, scratch, num_tiles, num_spans, num_rounds, target, stride_head, stride_tile,
    SPAN: gl.constexpr, ROUNDS: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Up to ROUNDS rounds of one tile and head. A warp has a round, each of its threads 16 words."""
    i_place, i_entry = gl.program_id(1), gl.program_id(2)
    tile = tiles + (first_tile + i_place) * FIELDS
    length = gl.load(tile + 2)
    position = gl.load(tile + 3)
    num_blocks = position // STEP * 4  # before the tile's own keys
    begin = gl.program_id(0) * ROUNDS
    end = gl.minimum(begin + ROUNDS, (num_blocks + 15) // 16)
    if ((begin == 0) | (begin < end)) & (gl.load(kept + i_entry) < 1):
        WARPS: gl.constexpr = gl.num_warps()
        layout: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
        per_query: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
        per_block: gl.constexpr = gl.SliceLayout(1, layout)
        o_m = gl.arange(0, STEP, per_query)
        place = i_entry * num_tiles + i_place
        b_own = gl.load(scratch.own + place * STEP + o_m)
        b_sum = b_own
        for i in range(0, (position // STEP * STEP + SPAN - 1) // SPAN):
            b_sum += gl.load(scratch.parts + (place * num_spans + i) * STEP + o_m)
        b_weight = gl.where(o_m < length, 1.0 / (b_sum * length.to(gl.float32)), 0.0)
        out = target + i_entry.to(gl.int64) * stride_head + i_place * stride_tile
        if begin == 0:
            line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
            o_b = gl.arange(0, 128, line)
            own = gl.sum(gl.where(o_m < length, b_own, 0.0) * b_weight, 0)
            num_own = (position + length - 1) // 32 + 1 - num_blocks
            gl.store(out + num_blocks + o_b, gl.where(o_b == 0, own, 0.0), mask=o_b < num_own)
        b_weight = b_weight * 2.0**87
        o_r = gl.arange(0, WARPS, gl.SliceLayout(1, per_block))
        o_t = gl.arange(0, 4, gl.SliceLayout(0, per_block))
        o_b = o_r[:, None] * 16 + o_t[None, :]
        o_round = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
        o_word = o_m[None, :, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
        words = scratch.bytes + place.to(gl.int64) * num_rounds * (STEP * 4) + o_word
        for i in range(begin, end, WARPS):
            b_word = gl.load(words + gl.minimum(i + o_round, end - 1) * (STEP * 4))
            for slot in gl.static_range(4):
                # A byte at the place of a float's lowest exponents: 2^87 makes up for it.
                b_bits = (b_word << (21 - 8 * slot)) if slot < 3 else (b_word >> 3)
                b_x = (b_bits & 0x1FE00000).to(gl.float32, bitcast=True)
                b_mass = gl.sum(b_x * b_weight[None, :, None], 1)
                o_block = i * 16 + slot * 4 + o_b
                gl.store(out + o_block, b_mass, mask=o_block < num_blocks)
