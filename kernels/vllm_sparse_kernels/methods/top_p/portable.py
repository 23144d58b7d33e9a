# SPDX-License-Identifier: Apache-2.0
"""Masses of blocks on every device that Triton supports: two launches for a run of tiles.

1. ``_scores_kernel`` computes the largest score of each query and block of 32 keys, in half precision. For each query
   and span of keys, it also computes the maximum of these scores and their sum of exponentials.
2. ``_masses_kernel`` divides the exponentials by each query's sum, averages them over the tile's queries, and tests
   whether one of them reaches the peak.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.methods.top_p.choice import KEY_BLOCK, mass_bytes
from vllm_sparse_kernels.methods.top_p.rounding import Rounded
from vllm_sparse_kernels.methods.top_p.scored import SCORED, SET_TILES, num_scored, scored_offsets
from vllm_sparse_kernels.online_softmax import add_exponentials, finite_maximum
from vllm_sparse_kernels.rows import TILE_FIELDS, ceil_div
from vllm_sparse_kernels.selection.lists import load_tile
from vllm_sparse_kernels.selection.slabs import SET_FIELDS, Run
from vllm_sparse_kernels.vectors import load_vector, store_vector, vector_pointers

PERMUTED = False
"""Whether keys are stored permuted within steps."""

STEP = Constant(128)
"""Keys of one matrix product."""

STEP_BLOCKS = Constant(STEP.value // KEY_BLOCK.value)

SPAN = Constant(8192)
"""Keys of one program."""

MASS_BLOCKS = Constant(64)
"""Blocks of one program of ``_masses_kernel``."""

MAX_SCORE = Constant(60000.0)
"""Limit of the absolute value of scores: half precision cannot represent much larger numbers."""


class Scratch(NamedTuple):
    """Tensors that the launches of a run pass to each other."""

    scores: Any  # [num_selected, num_tiles, num_blocks, SCORED] float16; undefined past a tile's causal blocks
    parts: Any  # [num_selected, num_tiles, num_spans, 2, SCORED] float32: largest score, sum; undefined past its spans


def tile_bytes(num_selected: int, reach: int) -> int:
    """Return the memory of one tile's scratch and masses."""
    scores, parts = 2 * blocks_of(reach), 2 * 4 * ceil_div(reach, SPAN.value)
    return num_selected * SCORED.value * (scores + parts) + mass_bytes(num_selected, reach)


def blocks_of(reach: int) -> int:
    """Return the number of a tile's blocks of 32 keys, in whole steps of 128 keys."""
    return ceil_div(reach, STEP.value) * STEP_BLOCKS.value


def compute_masses(call: Call, rounded: Rounded, run: Run, masses: torch.Tensor) -> None:
    """Compute, for each tile and block, the mean share of the tile's scored queries in the block."""
    empty, tiles, method, num_selected = call.index.workspace.empty, call.rows.tiles, call.method, len(call.heads)
    num_blocks, num_spans, scored = blocks_of(run.reach), ceil_div(run.reach, SPAN.value), SCORED.value
    scratch = Scratch(
        empty(num_selected, run.num_tiles, num_blocks, scored, dtype=torch.float16),
        empty(num_selected, run.num_tiles, num_spans, 2, scored),
    )
    kept_d = rounded.keys.shape[2]
    key_bytes = kept_d * rounded.keys.element_size()
    _scores_kernel[(len(run.tile_sets) * SET_TILES.value, num_spans, num_selected)](
        rounded, call.head_ids, tiles, run.first_tile, run.tile_sets, scratch, run.num_tiles, num_spans,
        num_blocks, GROUP=call.group, KEPT_D=kept_d, WIDEN=_must_widen(rounded.keys), num_warps=8,
        num_stages=_num_stages(key_bytes, shared_bytes(rounded.keys.device)),
    )  # fmt: skip
    _masses_kernel[(ceil_div(num_blocks, MASS_BLOCKS.value), run.num_tiles, num_selected)](
        method.least_peak, tiles, run.first_tile, scratch, num_spans, num_blocks, masses,
        *masses.stride()[:2], num_warps=8,
    )  # fmt: skip


def _must_widen(keys: torch.Tensor) -> bool:
    """Return whether products need float32, because the interpreter multiplies wrongly in lower precision."""
    return not keys.is_cuda


def _num_stages(key_bytes: int, limit_bytes: int) -> int:
    """Return the pipeline stages of the loop over keys in ``_scores_kernel``."""
    return 3 if (SCORED.value + 2 * STEP.value) * key_bytes <= limit_bytes else 2


@triton.jit(do_not_specialize=["first_tile", "num_tiles", "num_spans", "num_blocks"])
def _scores_kernel(
    rounded, heads, tiles, first_tile, tile_sets, scratch, num_tiles, num_spans, num_blocks,
    GROUP: tl.constexpr, KEPT_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Score one tile and span of keys of one head: the largest score of each query and block of 32 keys.

    Grid: (tile sets · SET_TILES, spans, n). Bound by the matrix units, and by the maxima of the products.

    Args:
        heads: [n] int32 on the device, numbers of the selected query heads.
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
        tile_sets: [num_sets, SET_FIELDS] int32: first tile, tiles, where the row's keys begin in the slab.
    """
    i_span, i_selected = tl.program_id(1), tl.program_id(2)
    tile_set, i_member = tile_sets + tl.program_id(0) // SET_TILES * SET_FIELDS, tl.program_id(0) % SET_TILES
    i_tile = tl.load(tile_set) + i_member
    length = tl.load(tiles + i_tile * TILE_FIELDS + 2, mask=i_member < tl.load(tile_set + 1), other=0)
    position = tl.load(tiles + i_tile * TILE_FIELDS + 3, mask=length > 0, other=0)
    begin = i_span * SPAN
    end = tl.minimum(begin + SPAN, position + length)
    if (length > 0) & (begin < end):
        o_m, o_n = tl.arange(0, SCORED), tl.arange(0, STEP)
        o_query = position + scored_offsets(o_m, length)
        o_block = tl.arange(0, STEP_BLOCKS)
        o_q = i_selected.to(tl.int64) * rounded.num_queries + i_tile * SCORED + o_m
        b_q = tl.load(vector_pointers(rounded.queries, o_q, KEPT_D))
        b_query_scale = tl.load(rounded.query_scales + o_q)
        first_key = (tl.load(heads + i_selected) // GROUP).to(tl.int64) * rounded.num_keys + tl.load(tile_set + 2)
        i_head_tile = (i_selected * num_tiles + i_tile - first_tile).to(tl.int64)
        tile_scores = scratch.scores + i_head_tile * num_blocks * SCORED + o_m[:, None]
        b_top = tl.full([SCORED], float("-inf"), tl.float32)
        b_sum = tl.zeros([SCORED], tl.float32)
        for i in range(begin, end, STEP):
            b_k = tl.load(vector_pointers(rounded.keys, first_key + i + o_n, KEPT_D))
            b_key_scale = tl.load(rounded.key_scales + (first_key + i) // KEY_BLOCK + o_block)
            if WIDEN:
                b_s = tl.dot(b_q.to(tl.float32), tl.trans(b_k.to(tl.float32)), input_precision="ieee")
            else:
                b_s = tl.dot(b_q, tl.trans(b_k)).to(tl.float32)
            b_s = tl.where((i + o_n)[None, :] <= o_query[:, None], b_s, float("-inf"))
            b_s = tl.max(tl.reshape(b_s, [SCORED, STEP_BLOCKS, KEY_BLOCK]), 2)
            # The lowest finite half stands in for minus infinity: scales past the row's end are 0, and 0 · ∞ is NaN.
            b_u = tl.maximum(b_s, -65504.0) * (b_query_scale[:, None] * b_key_scale[None, :])
            b_u = tl.where(b_s == float("-inf"), b_s, tl.minimum(tl.maximum(b_u, -MAX_SCORE), MAX_SCORE)).to(tl.float16)
            tl.store(tile_scores + (o_block + i // KEY_BLOCK)[None, :] * SCORED, b_u)
            b_top, b_sum = add_exponentials(b_top, b_sum, b_u.to(tl.float32))
        i_part = (i_head_tile * num_spans + i_span) * 2
        store_vector(scratch.parts, i_part, b_top)
        store_vector(scratch.parts, i_part + 1, b_sum)


@triton.jit(do_not_specialize=["first_tile", "num_spans", "num_blocks", "stride_head", "stride_tile"])
def _masses_kernel(
    peak, tiles, first_tile, scratch, num_spans, num_blocks, target, stride_head, stride_tile,
):  # fmt: skip
    """Average the queries' shares in some blocks of one tile and head.

    Grid: (blocks / MASS_BLOCKS, tiles of the run, n). Bound by memory: it reads 2 bytes for each query and block.

    Args:
        tiles: [num_tiles, 4] int32, ``Rows.tiles``.
        target: [n, tiles, width] float32; written.
        stride_head: Elements between two heads of ``target``.
        stride_tile: Elements between two tiles of ``target``.
    """
    i_tile, i_selected = tl.program_id(1), tl.program_id(2).to(tl.int64)
    _, _, length, position = load_tile(tiles, first_tile + i_tile)
    reach = position + length
    num_causal = tl.cdiv(reach, KEY_BLOCK)
    o_b = tl.program_id(0) * MASS_BLOCKS + tl.arange(0, MASS_BLOCKS)
    if tl.program_id(0) * MASS_BLOCKS < num_causal:
        o_m = tl.arange(0, SCORED)
        i_head_tile = i_selected * tl.num_programs(1) + i_tile
        # Join the maxima and sums of the spans.
        b_top = tl.full([SCORED], float("-inf"), tl.float32)
        b_sum = tl.zeros([SCORED], tl.float32)
        for i in range(tl.cdiv(reach, SPAN)):
            i_part = (i_head_tile * num_spans + i) * 2
            b_part_top = load_vector(scratch.parts, i_part, SCORED)
            b_new = tl.maximum(b_top, b_part_top)
            b_finite = finite_maximum(b_new)
            b_part_sum = load_vector(scratch.parts, i_part + 1, SCORED) * tl.exp2(b_part_top - b_finite)
            b_sum = b_sum * tl.exp2(b_top - b_finite) + b_part_sum
            b_top = b_new
        scored = num_scored(length)
        in_row = o_m < scored
        b_weight = tl.where(in_row, 1 / (b_sum * scored), 0.0)
        scores = vector_pointers(scratch.scores, i_head_tile * num_blocks + o_b, SCORED)
        is_score = (o_b < num_causal)[:, None] & in_row[None, :]
        b_u = tl.load(scores, mask=is_score, other=float("-inf")).to(tl.float32)
        b_share = tl.exp2(b_u - tl.where(in_row, b_top, 0.0)[None, :]) * b_weight[None, :]
        b_mass = tl.sum(b_share, 1)
        b_mass = tl.where(tl.max(b_share, 1) * scored >= peak, -b_mass, b_mass)
        tile_masses = target + i_selected * stride_head + i_tile.to(tl.int64) * stride_tile
        tl.store(tile_masses + o_b, b_mass, mask=o_b < num_causal)
