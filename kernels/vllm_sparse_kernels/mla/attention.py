# SPDX-License-Identifier: Apache-2.0
"""Attention of MLA's prefill in one launch: the A-shape, or blocks that are listed for each head and tile.

Keys have 192 channels, which is not a power of two. Scores are the sum of two products, over 128 and over 64 channels,
so nothing is padded to 256.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_sparse_kernels.cards import HOPPER_CAPABILITY, shared_bytes
from vllm_sparse_kernels.compile_time import LN_2, LOG2_E, compile_time
from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.mla.calls import BLOCK_TOKENS, TILE_FIELDS, Run, Tensors
from vllm_sparse_kernels.rows import TILE_TOKENS


class BlockLists(NamedTuple):
    """The kept blocks of each head and tile, in ascending order."""

    ids: Any  # [heads, tiles, width] int32, numbers of blocks of the row
    counts: Any  # [heads, tiles] int32


class AttendShape(NamedTuple):
    """Compile-time sizes of ``attend_kernel``; every field is a ``tl.constexpr``."""

    MAIN_D: Any  # channels of the first product, a power of two
    EXTRA_D: Any  # channels of the second product, a power of two
    VALUE_D: Any
    BLOCK_M: Any  # queries of a tile
    BLOCK_N: Any  # keys of a block
    STEP: Any  # keys of a product, a divisor of BLOCK_N
    CAUSAL: Any  # whether the keys are the row's new tokens
    PRECISION: Any  # ``input_precision`` of ``tl.dot`` for float32


class Tile(NamedTuple):
    """A tile of queries of one head."""

    tensors: Any
    k_main: Any  # descriptors for bulk copies, or None
    k_extra: Any
    v_matrix: Any
    i_head: Any  # int64
    position: Any  # of the tile's first query
    key_start: Any
    num_keys: Any
    key_position: Any
    blocks: Any  # pointer to the tile's list; None for the A-shape
    num_sink_blocks: Any  # of the A-shape: blocks before the gap
    gap_blocks: Any  # blocks between sinks and window
    sink_tokens: Any
    local_tokens: Any
    scale: Any  # factor from q·k to scores in base 2


class Softmax(NamedTuple):
    """The online softmax of a tile, in base 2."""

    b_acc: Any  # [BLOCK_M, VALUE_D] float32, Σ 2^(S - max) V
    b_max: Any  # [BLOCK_M] float32, largest scaled score; -inf before the first key
    b_sum: Any  # [BLOCK_M] float32, Σ 2^(S - max)


class LaunchOptions(NamedTuple):
    """Options of a launch of ``attend_kernel``, which do not affect what it computes."""

    step: int  # keys of a product
    num_warps: int
    num_stages: int


def run_attention(
    tensors: Tensors,
    run: Run,
    scale: float,
    is_causal: bool,
    *,
    lists: BlockLists | None = None,
    sink_tokens: int = 0,
    local_tokens: int = 0,
) -> None:
    """Compute attention of some tiles over listed blocks or, without lists, over the A-shape."""
    num_heads, main_d = tensors.q.shape[1], triton.next_power_of_2(tensors.q.shape[2] + 1) // 2
    device, is_float32 = tensors.q.device, tensors.q.dtype == torch.float32
    options = launch_options(shared_bytes(device))
    shape = AttendShape(
        main_d, tensors.q.shape[2] - main_d, tensors.v.shape[2], TILE_TOKENS, BLOCK_TOKENS,
        STEP=options.step, CAUSAL=is_causal, PRECISION="ieee" if is_float32 else "tf32",
    )  # fmt: skip
    attend_kernel[(run.num_tiles, num_heads)](
        tensors, tensors.lse.stride(0), *_matrices(tensors, shape), run.tiles, lists, run.width, scale * LOG2_E.value,
        sink_tokens, local_tokens, compile_time(shape),
        num_warps=options.num_warps, num_stages=options.num_stages,
    )  # fmt: skip


def _matrices(tensors: Tensors, shape: AttendShape) -> list[TensorDescriptor] | list[None]:
    """Return descriptors for bulk copies of a step of keys, in two parts, and of values.

    Rows of these matrices are tokens. The descriptors are None where bulk copies are not possible.
    """
    matrices: list[TensorDescriptor] = []
    widths = (shape.MAIN_D, shape.EXTRA_D, shape.VALUE_D)
    for x, width in zip((tensors.k, tensors.k, tensors.v), widths, strict=True):
        num_tokens, num_heads, head_dim = x.shape
        columns = (num_heads - 1) * x.stride(1) + head_dim
        is_aligned = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:2])
        if not has_bulk_copies(x.device) or not is_aligned or x.stride(0) < columns or num_tokens == 0:
            return [None, None, None]
        matrices.append(TensorDescriptor(x, [num_tokens, columns], [x.stride(0), 1], [shape.STEP, width]))
    return matrices


def has_bulk_copies(device: torch.device) -> bool:
    """Return whether a device can copy boxes of a matrix in bulk."""
    return capability_of(device) >= HOPPER_CAPABILITY


def launch_options(limit_bytes: int) -> LaunchOptions:
    """Return how the kernel is launched: a block of keys and values takes 40 KiB, and the queries take 48 KiB."""
    if limit_bytes > 200 << 10:
        return LaunchOptions(BLOCK_TOKENS, num_warps=8, num_stages=3)
    return LaunchOptions(BLOCK_TOKENS if limit_bytes > 128 << 10 else BLOCK_TOKENS // 2, num_warps=8, num_stages=2)


@triton.jit(do_not_specialize=["stride_lse_head", "width", "sink_tokens", "local_tokens"])
def attend_kernel(
    tensors, stride_lse_head, k_main, k_extra, v_matrix, tiles, lists, width, scale, sink_tokens, local_tokens, SHAPE
):  # fmt: skip
    """Compute O = softmax(scale · Q Kᵀ) V and its log-sum-exp, of one tile and head over the keys that it keeps.

    Keys are processed in three parts: masked, unmasked, masked. Only the masked parts have keys that some query does
    not keep, or the row's end, past which nothing is read.

    Grid: (tiles, heads), the set with the longest reach first, so that a head's keys stay in the L2 cache. Bound by the
    matrix units.

    Args:
        stride_lse_head: Elements between heads of the log-sum-exp.
        k_main: Descriptor of the keys as a matrix of tokens, with boxes of [STEP, MAIN_D]; or None. Only steps that
            need no mask are copied in bulk.
        k_extra: Like ``k_main``, with boxes of [STEP, EXTRA_D].
        v_matrix: Like ``k_main``, of the values, with boxes of [STEP, VALUE_D].
        tiles: [num_tiles, 8] int32, ``TileFields``.
    """
    i_tile, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    fields = tiles + i_tile * TILE_FIELDS
    token, length, offset = tl.load(fields).to(tl.int64), tl.load(fields + 1), tl.load(fields + 2)
    position, key_start = tl.load(fields + 3), tl.load(fields + 5)
    num_keys, key_position = tl.load(fields + 6), tl.load(fields + 7)
    first, last = position - key_position, position + length - 1 - key_position  # the queries' places among the keys
    reach = tl.minimum(num_keys, last + 1)
    num_blocks = (reach + SHAPE.BLOCK_N - 1) // SHAPE.BLOCK_N

    if lists is None:
        sink_end = tl.minimum(tl.maximum(sink_tokens - key_position, 0), reach)
        num_sink_blocks = (sink_end + SHAPE.BLOCK_N - 1) // SHAPE.BLOCK_N
        window = tl.minimum(tl.maximum(first - local_tokens + 1, 0), reach)
        first_local = tl.where(window < reach, window // SHAPE.BLOCK_N, num_blocks)
        first_local = tl.maximum(first_local, num_sink_blocks)
        full_begin = tl.maximum(last - local_tokens + SHAPE.BLOCK_N, 0) // SHAPE.BLOCK_N
        full_end = tl.minimum(num_keys, first + 1) // SHAPE.BLOCK_N
        gap_blocks = first_local - num_sink_blocks
        count = num_blocks - gap_blocks
        begin = tl.minimum(tl.maximum(full_begin - gap_blocks, num_sink_blocks), count)
        end = tl.maximum(tl.minimum(full_end - gap_blocks, count), begin)
        blocks = None
    else:
        num_sink_blocks, gap_blocks, begin = 0, 0, 0
        count = tl.load(lists.counts + i_head * tl.num_programs(0) + i_tile)
        # Masked blocks come last: the diagonal, which is always listed, or a block that may be partial.
        end = count - (num_blocks - offset // SHAPE.BLOCK_N) if SHAPE.CAUSAL else tl.maximum(count - 1, 0)
        blocks = lists.ids + (i_head * tl.num_programs(0) + i_tile) * width

    o_m = tl.arange(0, SHAPE.BLOCK_M)
    in_tile = o_m < length
    o_q = (token + o_m) * tensors.stride_q_token + i_head * tensors.stride_q_head
    b_q = tl.load(tensors.q + o_q[:, None] + tl.arange(0, SHAPE.MAIN_D)[None, :], mask=in_tile[:, None], other=0.0)
    o_extra = tl.arange(0, SHAPE.EXTRA_D) + SHAPE.MAIN_D
    b_extra = tl.load(tensors.q + o_q[:, None] + o_extra[None, :], mask=in_tile[:, None], other=0.0)
    tile = Tile(
        tensors, k_main, k_extra, v_matrix, i_head, position, key_start, num_keys, key_position, blocks,
        num_sink_blocks, gap_blocks, sink_tokens, local_tokens, scale,
    )  # fmt: skip
    softmax = Softmax(
        tl.zeros([SHAPE.BLOCK_M, SHAPE.VALUE_D], tl.float32),
        tl.full([SHAPE.BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([SHAPE.BLOCK_M], tl.float32),
    )
    PARTS: tl.constexpr = SHAPE.BLOCK_N // SHAPE.STEP
    softmax = _walk(b_q, b_extra, 0, begin * PARTS, tile, softmax, True, SHAPE)
    softmax = _walk(b_q, b_extra, begin * PARTS, end * PARTS, tile, softmax, False, SHAPE)
    softmax = _walk(b_q, b_extra, end * PARTS, count * PARTS, tile, softmax, True, SHAPE)

    is_empty = softmax.b_sum == 0
    b_sum = tl.where(is_empty, 1.0, softmax.b_sum)
    b_out = (softmax.b_acc / b_sum[:, None]).to(tensors.out.dtype.element_ty)
    o_out = (token + o_m) * tensors.stride_out_token + i_head * tensors.stride_out_head
    tl.store(tensors.out + o_out[:, None] + tl.arange(0, SHAPE.VALUE_D)[None, :], b_out, mask=in_tile[:, None])
    b_lse = tl.where(is_empty, float("-inf"), (softmax.b_max + tl.log2(b_sum)) * LN_2)
    tl.store(tensors.lse + i_head * stride_lse_head + token + o_m, b_lse, mask=in_tile)


@triton.jit
def _walk(b_q, b_extra, begin, end, tile, softmax, MASKED: tl.constexpr, SHAPE):
    """Process steps [begin, end) of the tile's blocks. A block has BLOCK_N / STEP steps."""
    PARTS: tl.constexpr = SHAPE.BLOCK_N // SHAPE.STEP
    tensors = tile.tensors
    o_step = tl.arange(0, SHAPE.STEP)
    for i in range(begin, end):
        i_listed = i // PARTS
        i_part = i - i_listed * PARTS
        if tile.blocks is None:
            i_block = i_listed + tl.where(i_listed >= tile.num_sink_blocks, tile.gap_blocks, 0)
        else:
            i_block = tl.load(tile.blocks + i_listed)
        first = i_block * SHAPE.BLOCK_N + i_part * SHAPE.STEP
        if tile.k_main is not None and not MASKED:
            i_row, i_column = tile.key_start + first, (tile.i_head * tensors.stride_k_head).to(tl.int32)
            b_k = tile.k_main.load([i_row, i_column])
            b_k_extra = tile.k_extra.load([i_row, i_column + SHAPE.MAIN_D])
            b_v = tile.v_matrix.load([i_row, (tile.i_head * tensors.stride_v_head).to(tl.int32)])
        else:
            b_k, b_k_extra, b_v = _load_step(first, tile, MASKED, SHAPE)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=SHAPE.PRECISION)
        b_s = tl.dot(b_extra, tl.trans(b_k_extra), b_s, input_precision=SHAPE.PRECISION)
        if MASKED:
            o_m = (tile.position + tl.arange(0, SHAPE.BLOCK_M))[:, None]
            o_n = (tile.key_position + first + o_step)[None, :]
            is_kept = (first + o_step < tile.num_keys)[None, :] & (o_n <= o_m)
            if tile.blocks is None:
                is_kept &= (o_n < tile.sink_tokens) | (o_n > o_m - tile.local_tokens)
            b_s = tl.where(is_kept, b_s, float("-inf"))
        softmax = _softmax_step(b_s, b_v, tile.scale, softmax, MASKED, SHAPE)
    return softmax


@triton.jit
def _load_step(first, tile, MASKED: tl.constexpr, SHAPE):
    """Load keys [STEP, MAIN_D] and [STEP, EXTRA_D], and values [STEP, VALUE_D], from the row's key ``first`` on.

    Past the row's end nothing is read, and they are 0: weights are 0 there, and 0 · NaN is NaN.
    """
    tensors = tile.tensors
    o_step = tl.arange(0, SHAPE.STEP)
    o_main, o_extra = tl.arange(0, SHAPE.MAIN_D)[None, :], tl.arange(0, SHAPE.EXTRA_D)[None, :] + SHAPE.MAIN_D
    o_value = tl.arange(0, SHAPE.VALUE_D)[None, :]
    i_key = (tile.key_start + first).to(tl.int64)
    k = tensors.k + i_key * tensors.stride_k_token + tile.i_head * tensors.stride_k_head
    k += o_step[:, None] * tensors.stride_k_token
    v = tensors.v + i_key * tensors.stride_v_token + tile.i_head * tensors.stride_v_head
    v += o_step[:, None] * tensors.stride_v_token
    if MASKED:
        in_row = (first + o_step < tile.num_keys)[:, None]
        b_k = tl.load(k + o_main, mask=in_row, other=0.0)
        b_k_extra = tl.load(k + o_extra, mask=in_row, other=0.0)
        b_v = tl.load(v + o_value, mask=in_row, other=0.0)
        return b_k, b_k_extra, b_v
    else:
        return tl.load(k + o_main), tl.load(k + o_extra), tl.load(v + o_value)


@triton.jit
def _softmax_step(b_s, b_v, scale, softmax, MASKED: tl.constexpr, SHAPE):
    """Process a step of the online softmax, with unscaled scores. If MASKED, a query may not have kept any key yet."""
    b_max = tl.maximum(softmax.b_max, tl.max(b_s, 1) * scale)
    b_finite = b_max
    if MASKED:
        b_finite = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_decay = tl.exp2(softmax.b_max - b_finite)
    b_p = tl.exp2(b_s * scale - b_finite[:, None])
    b_sum = softmax.b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, softmax.b_acc * b_decay[:, None], input_precision=SHAPE.PRECISION)
    return Softmax(b_acc, b_max, b_sum)
