# SPDX-License-Identifier: Apache-2.0
"""Products of rounded queries and keys for ``top_p``: the largest product of each scored query and block of 64 keys.

The scored queries of neighbouring tiles are multiplied together, so that they fill whole matrix products. A step of
keys is read once for 256 scored queries, those of four tiles, on Hopper, and for 128 elsewhere.

Products are stored without their factors. The kernels that read them are bound by memory, so the factors cost nothing
there; here, each instruction for a product counts.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_sparse_kernels.cards import HOPPER_CAPABILITY
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.methods.top_p.scored import SCORED, num_scored, scored_offsets
from vllm_sparse_kernels.mla.attention import has_bulk_copies
from vllm_sparse_kernels.mla.calls import BLOCK, SET_FIELDS, MlaCall, Part, load_fields
from vllm_sparse_kernels.mla.rounding import KEPT_D, Rounded
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.vectors import vector_pointers

STEP = Constant(128)
"""Keys of a matrix product."""

SPAN_TOKENS = 8192
"""Keys of one program."""


def set_tiles(device: torch.device) -> int:
    """Return the maximum number of tiles whose scored queries are multiplied together."""
    return 4 if capability_of(device) == HOPPER_CAPABILITY else 2


def run_products(call: MlaCall, part: Part, num_heads: int, rounded: Rounded, products: torch.Tensor) -> None:
    """Compute the largest product of each scored query and block of some heads."""
    num_tiles = set_tiles(products.device)
    _products_kernel[(len(part.sets), ceil_div(part.most_keys, SPAN_TOKENS), num_heads)](
        rounded, _matrix(rounded.keys), products, part.tiles, part.sets, len(part.tiles), part.width,
        CAUSAL=call.is_causal, SPAN=SPAN_TOKENS, TILES=num_tiles, ARITHMETIC=_arithmetic(products.device),
        num_warps=8, num_stages=3, maxnreg=128 if num_tiles == 4 else None,
    )  # fmt: skip


def _arithmetic(device: torch.device) -> str:
    """Return the type of sums of products; "widened" to multiply in float32 too."""
    if device.type != "cuda":
        # The interpreter's products are wrong in lower precision.
        return "widened"
    return "float16" if capability_of(device) == HOPPER_CAPABILITY else "float32"


def _matrix(keys: torch.Tensor) -> TensorDescriptor | None:
    """Return a descriptor for bulk copies of a step of rounded keys; None where they are not possible."""
    if not has_bulk_copies(keys.device):
        return None
    matrix = keys.flatten(0, 1)
    return TensorDescriptor(matrix, list(matrix.shape), [KEPT_D.value, 1], [STEP.value, KEPT_D.value])


@triton.jit
def reach_of(fields, CAUSAL: tl.constexpr):
    """Return the number of keys up to a tile's last query."""
    if CAUSAL:
        return tl.minimum(fields.num_keys, fields.offset + fields.length)
    else:
        return fields.num_keys


@triton.jit(do_not_specialize=["num_tiles", "width"])
def _products_kernel(
    rounded, key_matrix, products, tiles, sets, num_tiles, width,
    CAUSAL: tl.constexpr, SPAN: tl.constexpr, TILES: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    """Multiply the scored queries of up to TILES neighbouring tiles of one row and head with a span of keys.

    Grid: (sets, spans, heads). Bound by the matrix units.

    Args:
        key_matrix: Descriptor of the rounded keys of all heads as a matrix of tokens, with boxes of [STEP, KEPT_D];
            None to load them by pointers.
        products: [heads, num_tiles, width, SCORED] float16, each query's largest product of each block; written.
        tiles: [num_tiles, 8] int32, ``TileFields``.
        sets: [num_sets, 2] int32, ``Part.sets``.
        ARITHMETIC: see ``_arithmetic``.
    """
    i_head = tl.program_id(2).to(tl.int64)
    tile_set = sets + tl.program_id(0) * SET_FIELDS
    i_tile, count = tl.load(tile_set), tl.load(tile_set + 1)
    # The first tile has the longest reach, and the last tile the first query.
    first_tile, last_tile = load_fields(tiles, i_tile), load_fields(tiles, i_tile + count - 1)
    reach = reach_of(first_tile, CAUSAL)
    begin = tl.program_id(1) * SPAN
    end = tl.minimum(begin + SPAN, reach)
    if begin < end:
        o_r = tl.arange(0, TILES * SCORED)
        o_s = o_r % SCORED
        b_tile = i_tile + tl.minimum(o_r // SCORED, count - 1)
        fields = load_fields(tiles, b_tile)
        is_scored = ((o_r // SCORED < count) & (o_s < num_scored(fields.length)))[:, None]
        b_place = scored_offsets(o_s, fields.length)
        i_query = i_head * rounded.num_queries + fields.query + b_place
        b_q = tl.load(vector_pointers(rounded.queries, i_query, KEPT_D), mask=is_scored, other=0.0)
        b_last = fields.offset + b_place  # each query's last key, if the keys are new tokens
        first_key = i_head * rounded.num_keys + first_tile.key_start
        target = products + ((i_head * num_tiles + b_tile) * width * SCORED + o_s)[:, None]
        whole = last_tile.offset if CAUSAL else reach
        whole = tl.minimum(tl.maximum(whole // STEP * STEP, begin), end)
        o_b = tl.arange(0, STEP // BLOCK)[None, :]
        for i in range(begin, whole, STEP):
            b_s = _multiply(b_q, rounded.keys, key_matrix, first_key, i, reach, ARITHMETIC)
            tl.store(target + (i // BLOCK + o_b) * SCORED, _block_maxima(b_s), mask=is_scored)
        for i in range(whole, end, STEP):
            b_s = _multiply(b_q, rounded.keys, key_matrix, first_key, i, reach, ARITHMETIC)
            o_n = (i + tl.arange(0, STEP))[None, :]
            b_s = tl.where(o_n <= b_last[:, None] if CAUSAL else o_n < reach, b_s, float("-inf"))
            in_reach = is_scored & ((i // BLOCK + o_b) * BLOCK < reach)
            tl.store(target + (i // BLOCK + o_b) * SCORED, _block_maxima(b_s), mask=in_reach)


@triton.jit
def _multiply(b_q, keys, key_matrix, first_key, i, reach, ARITHMETIC: tl.constexpr):
    """Return the products [queries, STEP] with the keys from key i on; undefined for keys past ``reach``."""
    if key_matrix is not None:
        b_k = key_matrix.load([(first_key + i).to(tl.int32), 0])
    else:
        o_n = i + tl.arange(0, STEP)
        b_k = tl.load(vector_pointers(keys, first_key + o_n, KEPT_D), mask=(o_n < reach)[:, None])
    if ARITHMETIC == "widened":
        return tl.dot(b_q.to(tl.float32), tl.trans(b_k.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(b_q, tl.trans(b_k), out_dtype=tl.float16 if ARITHMETIC == "float16" else tl.float32)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _block_maxima(b_s):
    """Return the largest of each BLOCK neighbouring columns, in half precision."""
    b_s = tl.reshape(b_s, [b_s.shape[0], b_s.shape[1] // BLOCK, BLOCK])
    if b_s.dtype == tl.float16:
        return tl.reduce(b_s, 2, _larger)  # ``tl.max`` would convert each element to float32
    else:
        return tl.max(b_s, 2).to(tl.float16)
