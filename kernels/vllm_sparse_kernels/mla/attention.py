# SPDX-License-Identifier: Apache-2.0
"""Attention of MLA's prefill in one launch: a window with sinks, or blocks that are listed for each head and tile.

Keys have 192 channels, which is not a power of two. Scores are the sum of two products, over 128 and over 64 channels,
so nothing is padded to 256.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_sparse_kernels.cards import HOPPER_CAPABILITY, shared_bytes
from vllm_sparse_kernels.compile_time import LN_2, LOG2_E, Constant
from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.mla.calls import BLOCK, KEY_D, VALUE_D, MlaCall, Part, Tensors, load_fields
from vllm_sparse_kernels.online_softmax import Softmax, softmax_step
from vllm_sparse_kernels.rows import TILE

MAIN_D, EXTRA_D = Constant(128), Constant(KEY_D.value - 128)
"""Channels of the two products."""


class BlockLists(NamedTuple):
    """The kept blocks of each head and tile, in ascending order."""

    ids: Any  # [heads, tiles, width] int32, numbers of blocks of the row
    counts: Any  # [heads, tiles] int32


class Tile(NamedTuple):
    """A tile of queries of one head."""

    tensors: Any
    k_main: Any  # descriptors for bulk copies, or None
    k_extra: Any
    v_matrix: Any
    i_head: Any  # int64
    fields: Any  # TileFields
    blocks: Any  # pointer to the tile's list; None for a window
    num_sink_blocks: Any  # of a window: blocks before the gap
    gap_blocks: Any  # blocks between sinks and window
    sink_tokens: Any
    local_tokens: Any
    scale: Any  # factor from q·k to scores in base 2


def run_attention(tensors: Tensors, call: MlaCall, part: Part, scale: float, lists: BlockLists | None) -> None:
    """Compute attention of some rows over listed blocks of all keys or, without lists, over the call's window."""
    step, num_stages = _steps(shared_bytes(tensors.q.device))
    attend_kernel[(len(part.tiles), tensors.q.shape[1])](
        tensors, tensors.lse.stride(0), *_matrices(tensors, step), part.tiles, lists, part.width,
        scale * LOG2_E.value, call.window.sink_tokens, call.window.local_tokens,
        CAUSAL=call.is_causal, STEP=step, num_warps=8, num_stages=num_stages,
    )  # fmt: skip


def _matrices(tensors: Tensors, step: int) -> list[TensorDescriptor] | list[None]:
    """Return descriptors of token rows for bulk copies of a step's keys, in two parts, and values; None without."""
    if not has_bulk_copies(tensors.q.device):
        return [None, None, None]
    matrices: list[TensorDescriptor] = []
    for x, width in ((tensors.k, MAIN_D.value), (tensors.k, EXTRA_D.value), (tensors.v, VALUE_D.value)):
        num_tokens, num_heads, head_dim = x.shape
        shape = [num_tokens, (num_heads - 1) * x.stride(1) + head_dim]
        matrices.append(TensorDescriptor(x, shape, [x.stride(0), 1], [step, width]))
    return matrices


def has_bulk_copies(device: torch.device) -> bool:
    """Return whether a device can copy boxes of a matrix in bulk."""
    return capability_of(device) >= HOPPER_CAPABILITY


def _steps(limit_bytes: int) -> tuple[int, int]:
    """Return the keys of a product and the stages: 64 keys and values take 40 KiB, and the queries take 48 KiB."""
    if limit_bytes > 200 << 10:
        return BLOCK.value, 3
    return BLOCK.value if limit_bytes > 128 << 10 else BLOCK.value // 2, 2


@triton.jit(do_not_specialize=["stride_lse_head", "width", "sink_tokens", "local_tokens"])
def attend_kernel(
    tensors, stride_lse_head, k_main, k_extra, v_matrix, tiles, lists, width, scale, sink_tokens, local_tokens,
    CAUSAL: tl.constexpr, STEP: tl.constexpr,
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
    fields = load_fields(tiles, i_tile)
    token = fields.query.to(tl.int64)
    first = fields.position - fields.key_position  # the queries' places among the keys
    last = first + fields.length - 1
    reach = tl.minimum(fields.num_keys, last + 1)
    num_blocks = tl.cdiv(reach, BLOCK)

    if lists is None:
        sink_end = tl.minimum(tl.maximum(sink_tokens - fields.key_position, 0), reach)
        num_sink_blocks = tl.cdiv(sink_end, BLOCK)
        window = tl.minimum(tl.maximum(first - local_tokens + 1, 0), reach)
        first_local = tl.where(window < reach, window // BLOCK, num_blocks)
        first_local = tl.maximum(first_local, num_sink_blocks)
        full_begin = tl.maximum(last - local_tokens + BLOCK, 0) // BLOCK
        full_end = tl.minimum(fields.num_keys, first + 1) // BLOCK
        gap_blocks = first_local - num_sink_blocks
        count = num_blocks - gap_blocks
        begin = tl.minimum(tl.maximum(full_begin - gap_blocks, num_sink_blocks), count)
        end = tl.maximum(tl.minimum(full_end - gap_blocks, count), begin)
        blocks = None
    else:
        num_sink_blocks, gap_blocks, begin = 0, 0, 0
        count = tl.load(lists.counts + i_head * tl.num_programs(0) + i_tile)
        # Masked blocks come last: the diagonal, which is always listed, or a block that may be partial.
        end = count - (num_blocks - fields.offset // BLOCK) if CAUSAL else tl.maximum(count - 1, 0)
        blocks = lists.ids + (i_head * tl.num_programs(0) + i_tile) * width

    o_m = tl.arange(0, TILE)
    in_tile = o_m < fields.length
    q = tensors.q + (token + o_m)[:, None] * tensors.stride_q_token + i_head * tensors.stride_q_head
    b_q = tl.load(q + tl.arange(0, MAIN_D)[None, :], mask=in_tile[:, None], other=0.0)
    b_extra = tl.load(q + MAIN_D + tl.arange(0, EXTRA_D)[None, :], mask=in_tile[:, None], other=0.0)
    tile = Tile(
        tensors, k_main, k_extra, v_matrix, i_head, fields, blocks, num_sink_blocks, gap_blocks, sink_tokens,
        local_tokens, scale,
    )  # fmt: skip
    softmax = Softmax(
        tl.zeros([TILE, VALUE_D], tl.float32),
        tl.full([TILE], float("-inf"), tl.float32),
        tl.zeros([TILE], tl.float32),
    )
    PARTS: tl.constexpr = BLOCK // STEP
    softmax = _walk(b_q, b_extra, 0, begin * PARTS, tile, softmax, True, STEP)
    softmax = _walk(b_q, b_extra, begin * PARTS, end * PARTS, tile, softmax, False, STEP)
    softmax = _walk(b_q, b_extra, end * PARTS, count * PARTS, tile, softmax, True, STEP)

    is_empty = softmax.b_sum == 0
    b_sum = tl.where(is_empty, 1.0, softmax.b_sum)
    b_out = (softmax.b_acc / b_sum[:, None]).to(tensors.out.dtype.element_ty)
    out = tensors.out + (token + o_m)[:, None] * tensors.stride_out_token + i_head * tensors.stride_out_head
    tl.store(out + tl.arange(0, VALUE_D)[None, :], b_out, mask=in_tile[:, None])
    b_lse = tl.where(is_empty, float("-inf"), (softmax.b_max + tl.log2(b_sum)) * LN_2)
    tl.store(tensors.lse + i_head * stride_lse_head + token + o_m, b_lse, mask=in_tile)


@triton.jit
def _walk(b_q, b_extra, begin, end, tile, softmax, MASKED: tl.constexpr, STEP: tl.constexpr):
    """Process steps [begin, end) of the tile's blocks. A block has BLOCK / STEP steps."""
    PARTS: tl.constexpr = BLOCK // STEP
    tensors = tile.tensors
    o_step = tl.arange(0, STEP)
    for i in range(begin, end):
        i_listed = i // PARTS
        i_part = i - i_listed * PARTS
        if tile.blocks is None:
            i_block = i_listed + tl.where(i_listed >= tile.num_sink_blocks, tile.gap_blocks, 0)
        else:
            i_block = tl.load(tile.blocks + i_listed)
        first = i_block * BLOCK + i_part * STEP
        if tile.k_main is not None and not MASKED:
            i_row, i_column = tile.fields.key_start + first, (tile.i_head * tensors.stride_k_head).to(tl.int32)
            b_k = tile.k_main.load([i_row, i_column])
            b_k_extra = tile.k_extra.load([i_row, i_column + MAIN_D])
            b_v = tile.v_matrix.load([i_row, (tile.i_head * tensors.stride_v_head).to(tl.int32)])
        else:
            b_k, b_k_extra, b_v = _load_step(first, tile, MASKED, STEP)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_s = tl.dot(b_extra, tl.trans(b_k_extra), b_s, input_precision="ieee")
        if MASKED:
            o_m = (tile.fields.position + tl.arange(0, TILE))[:, None]
            o_n = (tile.fields.key_position + first + o_step)[None, :]
            is_kept = (first + o_step < tile.fields.num_keys)[None, :] & (o_n <= o_m)
            is_kept &= (o_n < tile.sink_tokens) | (o_n > o_m - tile.local_tokens)
            b_s = tl.where(is_kept, b_s, float("-inf"))
        softmax = softmax_step(b_s, b_v, tile.scale, None, softmax, MAY_SEE_NONE=MASKED)
    return softmax


@triton.jit
def _load_step(first, tile, MASKED: tl.constexpr, STEP: tl.constexpr):
    """Load keys [STEP, MAIN_D] and [STEP, EXTRA_D], and values [STEP, VALUE_D], from the row's key ``first`` on.

    Past the row's end nothing is read, and they are 0: weights are 0 there, and 0 · NaN is NaN.
    """
    tensors = tile.tensors
    o_step = tl.arange(0, STEP)
    i_key = (tile.fields.key_start + first).to(tl.int64)
    k = tensors.k + i_key * tensors.stride_k_token + tile.i_head * tensors.stride_k_head
    k += o_step[:, None] * tensors.stride_k_token
    v = tensors.v + i_key * tensors.stride_v_token + tile.i_head * tensors.stride_v_head
    v += o_step[:, None] * tensors.stride_v_token
    in_row = (first + o_step < tile.fields.num_keys)[:, None] if MASKED else None
    other = 0.0 if MASKED else None
    return (
        tl.load(k + tl.arange(0, MAIN_D)[None, :], mask=in_row, other=other),
        tl.load(k + MAIN_D + tl.arange(0, EXTRA_D)[None, :], mask=in_row, other=other),
        tl.load(v + tl.arange(0, VALUE_D)[None, :], mask=in_row, other=other),
    )
