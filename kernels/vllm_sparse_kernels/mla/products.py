# SPDX-License-Identifier: Apache-2.0
"""Products of rounded queries and keys for ``top_p``: the largest product of each scored query and block of 64 keys.

The scored queries of neighbouring tiles are multiplied together, so half of the queries fill whole matrix products too.
On Hopper, a step of keys is read once for 256 scored queries: those of four tiles with half of the queries, or of two
tiles with all. Elsewhere it is read for 128, of two tiles or one.

Products are stored without their factors. The kernels that read them are bound by memory, so the factors cost nothing
there; here, each instruction for a product counts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_sparse_kernels.cards import HOPPER_CAPABILITY, shared_bytes
from vllm_sparse_kernels.compile_time import Constant, compile_time
from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.methods.top_p.scored import num_scored, scored_offsets
from vllm_sparse_kernels.mla.attention import has_bulk_copies
from vllm_sparse_kernels.mla.calls import BLOCK_TOKENS, SET_FIELDS, SET_TILES, TILE_FIELDS, MlaTopP, Run
from vllm_sparse_kernels.mla.channels import Rounded
from vllm_sparse_kernels.rows import ceil_div

BLOCK = Constant(BLOCK_TOKENS)

SPAN_TOKENS = 8192
"""Keys of one program."""


class ProductLaunch(NamedTuple):
    """How ``_products_kernel`` is launched and computes."""

    rows: int  # scored queries of a program: 128 or 256
    step: int  # keys of a product
    arithmetic: str  # ``ProductShape.ARITHMETIC``
    num_warps: int
    num_stages: int
    maxnreg: int | None  # limit of a thread's registers
    is_bulk: bool = True  # whether keys are copied in bulk, where the device can


HOPPER_LAUNCHES = (
    ProductLaunch(256, 128, "float16", num_warps=8, num_stages=3, maxnreg=128),
    ProductLaunch(256, 128, "float16", num_warps=8, num_stages=2, maxnreg=128),
)
"""Launches on Hopper, for vectors of up to 128 bytes, and for wider vectors."""


class ProductShape(NamedTuple):
    """Compile-time sizes of ``_products_kernel``; every field is a ``tl.constexpr``."""

    MAIN_D: Any  # channels of the first product, a power of two
    EXTRA_D: Any  # channels of the second product, a power of two; 0 if there is none
    CAUSAL: Any  # whether the keys are the rows' new tokens
    SPAN: Any  # keys of a program
    SCORED: Any  # scored queries of a whole tile
    ROWS: Any  # scored queries of a program
    STEP: Any  # keys of a product
    ARITHMETIC: Any
    """Type of the sums of products: "float16", "float32", or "widened" to multiply in float32 too, because the
    interpreter's products are wrong in lower precision."""


def run_products(
    method: MlaTopP,
    run: Run,
    is_causal: bool,
    longest_keys: int,
    num_heads: int,
    rounded: Rounded,
    products: torch.Tensor,
) -> None:
    """Compute the largest product of each scored query and block of some heads and tiles."""
    keys, scored = rounded.keys.data, method.num_scored
    main_d, extra_d = product_sizes(keys.shape[2], method.channels)
    vector_bytes = method.channels * keys.element_size()
    launch = product_launch(vector_bytes, product_arithmetic(keys.device), shared_bytes(keys.device))
    shape = ProductShape(
        main_d, extra_d, is_causal, SPAN_TOKENS, scored, launch.rows, launch.step, launch.arithmetic
    )  # fmt: skip
    matrices = _matrices(keys, shape) if launch.is_bulk else [None, None]
    num_parts = SET_TILES.value * scored // launch.rows  # of a set
    _products_kernel[(run.num_sets * num_parts, ceil_div(longest_keys, SPAN_TOKENS), num_heads)](
        rounded, *matrices, products, run.tiles, run.sets, run.first_tile, run.num_tiles, run.width,
        compile_time(shape),
        num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.maxnreg,
    )  # fmt: skip


def product_sizes(head_dim: int, channels: int) -> tuple[int, int]:
    """Divide the channels of a score between two products, which are added."""
    if channels < head_dim:
        return channels, 0
    main_d = triton.next_power_of_2(head_dim + 1) // 2
    return main_d, head_dim - main_d


def product_arithmetic(device: torch.device) -> str:
    """Return the type in which products are summed."""
    if device.type != "cuda":
        return "widened"
    return "float16" if capability_of(device) == HOPPER_CAPABILITY else "float32"


def product_launch(vector_bytes: int, arithmetic: str, limit_bytes: int) -> ProductLaunch:
    """Choose how the kernel is launched."""
    if arithmetic == "float16":
        return HOPPER_LAUNCHES[vector_bytes > 128]
    if (128 + 2 * 128) * vector_bytes <= limit_bytes:
        return ProductLaunch(128, 128, arithmetic, num_warps=8, num_stages=3, maxnreg=None)
    return ProductLaunch(128, BLOCK_TOKENS, arithmetic, num_warps=8, num_stages=2, maxnreg=None)


def _matrices(keys: torch.Tensor, shape: ProductShape) -> list[TensorDescriptor | None]:
    """Return descriptors for bulk copies of a step of rounded keys, in one or two parts; None where not possible."""
    if not has_bulk_copies(keys.device):
        return [None, None]
    num_places, channels = keys.shape[0] * keys.shape[1], shape.MAIN_D + shape.EXTRA_D
    matrix = keys.view(-1)[: num_places * channels].view(num_places, channels)
    return [
        TensorDescriptor(matrix, [num_places, channels], [channels, 1], [shape.STEP, width]) if width > 0 else None
        for width in (shape.MAIN_D, shape.EXTRA_D)
    ]


@triton.jit
def load_reach(fields, CAUSAL: tl.constexpr):
    """Return the number of keys up to a tile's last query."""
    num_keys = tl.load(fields + 6)
    if CAUSAL:
        return tl.minimum(num_keys, tl.load(fields + 2) + tl.load(fields + 1))
    else:
        return num_keys


@triton.jit(
    do_not_specialize=["first_tile", "num_tiles", "width"],
    do_not_specialize_on_alignment=["sets"],  # a run may begin at an odd set
)
def _products_kernel(rounded, k_main, k_extra, products, tiles, sets, first_tile, num_tiles, width, SHAPE):
    """Multiply up to ROWS scored queries, from neighbouring tiles of one row and head, with a span of keys.

    Grid: (sets · parts of a set, spans, heads). Bound by the matrix units.

    Args:
        k_main: Descriptor of the rounded keys of all heads as a matrix of tokens, with boxes of [STEP, MAIN_D]; None
            to load them by pointers.
        k_extra: Like ``k_main``, with boxes of [STEP, EXTRA_D]; None without a second product.
        products: [heads, num_tiles, width, SCORED] float16, each query's largest product of each block; written.
        tiles: [num_tiles, 8] int32, ``TileFields``.
        sets: [num_sets, 2] int32, ``TileSet``.
    """
    HEAD_D: tl.constexpr = SHAPE.MAIN_D + SHAPE.EXTRA_D
    GROUP: tl.constexpr = SHAPE.ROWS // SHAPE.SCORED  # tiles of a program
    PARTS: tl.constexpr = SET_TILES // GROUP
    i_head = tl.program_id(2).to(tl.int64)
    i_part = tl.program_id(0) % PARTS
    tile_set = sets + tl.program_id(0) // PARTS * SET_FIELDS
    i_tile = tl.load(tile_set) - first_tile + i_part * GROUP
    count = tl.minimum(tl.load(tile_set + 1) - i_part * GROUP, GROUP)
    # The first tile has the longest reach, and the last tile the first query.
    first_fields = tiles + i_tile * TILE_FIELDS
    reach = load_reach(first_fields, SHAPE.CAUSAL) if count > 0 else 0
    begin = tl.program_id(1) * SHAPE.SPAN
    end = tl.minimum(begin + SHAPE.SPAN, reach)
    if begin < end:
        o_r = tl.arange(0, SHAPE.ROWS)
        o_s = o_r % SHAPE.SCORED
        b_tile = i_tile + tl.minimum(o_r // SHAPE.SCORED, count - 1)
        b_fields = tiles + b_tile * TILE_FIELDS
        b_length = tl.load(b_fields + 1)
        is_scored = (o_r // SHAPE.SCORED < count) & (o_s < num_scored(b_length, SHAPE.SCORED))
        b_place = scored_offsets(o_s, b_length, SHAPE.SCORED)
        i_query = i_head * rounded.queries.num_places + tl.load(b_fields) + b_place
        queries = rounded.queries.data + i_query[:, None] * HEAD_D
        b_q = tl.load(queries + tl.arange(0, SHAPE.MAIN_D)[None, :], mask=is_scored[:, None], other=0.0)
        b_extra = None
        if SHAPE.EXTRA_D > 0:
            o_extra = tl.arange(0, SHAPE.EXTRA_D) + SHAPE.MAIN_D
            b_extra = tl.load(queries + o_extra[None, :], mask=is_scored[:, None], other=0.0)
        b_last = tl.load(b_fields + 2) + b_place  # each query's last key, if the keys are new tokens
        first_key = i_head * rounded.keys.num_places + tl.load(first_fields + 5)
        target = products + ((i_head * num_tiles + b_tile) * width * SHAPE.SCORED + o_s)[:, None]
        whole = tl.load(first_fields + (count - 1) * TILE_FIELDS + 2) if SHAPE.CAUSAL else reach
        whole = tl.minimum(tl.maximum(whole // SHAPE.STEP * SHAPE.STEP, begin), end)
        o_b = tl.arange(0, SHAPE.STEP // BLOCK)[None, :]
        for i in range(begin, whole, SHAPE.STEP):
            b_s = _multiply(b_q, b_extra, rounded, k_main, k_extra, first_key, i, reach, False, SHAPE)
            b_largest = _block_maxima(b_s)
            tl.store(target + (i // BLOCK + o_b) * SHAPE.SCORED, b_largest, mask=is_scored[:, None])
        for i in range(whole, end, SHAPE.STEP):
            b_s = _multiply(b_q, b_extra, rounded, k_main, k_extra, first_key, i, reach, True, SHAPE)
            o_n = (i + tl.arange(0, SHAPE.STEP))[None, :]
            b_s = tl.where(o_n <= b_last[:, None] if SHAPE.CAUSAL else o_n < reach, b_s, float("-inf"))
            b_largest = _block_maxima(b_s)
            in_reach = is_scored[:, None] & ((i // BLOCK + o_b) * BLOCK < reach)
            tl.store(target + (i // BLOCK + o_b) * SHAPE.SCORED, b_largest, mask=in_reach)


@triton.jit
def _multiply(b_q, b_extra, rounded, k_main, k_extra, first_key, i, reach, MASKED: tl.constexpr, SHAPE):
    """Return the products [ROWS, STEP] of queries with the keys from key i on; undefined for keys past ``reach``."""
    if k_main is not None:
        i_row = (first_key + i).to(tl.int32)
        b_k = k_main.load([i_row, 0])
        if SHAPE.EXTRA_D > 0:
            b_k_extra = k_extra.load([i_row, SHAPE.MAIN_D])
    else:
        o_n = i + tl.arange(0, SHAPE.STEP)
        in_reach = (o_n < reach)[:, None] if MASKED else None
        keys = rounded.keys.data + (first_key + o_n)[:, None] * (SHAPE.MAIN_D + SHAPE.EXTRA_D)
        b_k = tl.load(keys + tl.arange(0, SHAPE.MAIN_D)[None, :], mask=in_reach)
        if SHAPE.EXTRA_D > 0:
            b_k_extra = tl.load(keys + (tl.arange(0, SHAPE.EXTRA_D) + SHAPE.MAIN_D)[None, :], mask=in_reach)
    if SHAPE.ARITHMETIC == "widened":
        b_s = tl.dot(b_q.to(tl.float32), tl.trans(b_k.to(tl.float32)), input_precision="ieee")
        if SHAPE.EXTRA_D > 0:
            b_s = tl.dot(b_extra.to(tl.float32), tl.trans(b_k_extra.to(tl.float32)), b_s, input_precision="ieee")
    else:
        DTYPE: tl.constexpr = tl.float16 if SHAPE.ARITHMETIC == "float16" else tl.float32
        b_s = tl.dot(b_q, tl.trans(b_k), out_dtype=DTYPE)
        if SHAPE.EXTRA_D > 0:
            b_s = tl.dot(b_extra, tl.trans(b_k_extra), b_s, out_dtype=DTYPE)
    return b_s


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
