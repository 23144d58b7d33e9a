"""Keys in 8 bits, for ``attend``: SageAttention's (Zhang et al., arXiv 2410.02367), as SpargeAttn and SALE use it.

Equation 6 and Algorithm 1, kernel SAGEAttn-B: keys lose their mean over the row, which shifts all scores of a query
alike and which softmax so does not see, and become integers −127 … 127, with one scale for each block of 64 keys of a
kv head: δ = max |k − k̄| / 127. (Queries get one scale for each tile of 128, in ``attend`` itself.)

The mean is over the keys that this step sees: the last bits of the rounding depend on the chunking.

Keys are quantised once for each call of ``attend``, out of the paged cache into a workspace of a byte for each element
of the rows' keys, row after row; a quarter millisecond for 131,072 keys of 8 kv heads of 128 at an H100's bandwidth.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.paged import PagedCache, key_args, key_offsets
from vllm_sparse_kernels.rows import Rows, ceil_div, to_device

STEP_TOKENS = tl.constexpr(64)
"""Keys that share a scale."""

ALIGN_TOKENS = 128
"""A row's keys are padded to whole blocks of either size."""

SPLIT_TOKENS = 1024
"""Keys that one program adds up for the mean."""

INT8_MAX = tl.constexpr(127.0)
TINY = tl.constexpr(1e-20)  # stands in for the largest magnitude of a block of zeros

VARYING = ("i_row", "seq_len", "start", "num_keys")
"""Kernel arguments that change from step to step: they shall not call for new variants of a kernel."""


class SmoothKeys(NamedTuple):
    """8-bit keys of all rows. What belongs to kv heads that no 8-bit head reads is undefined."""

    integers: torch.Tensor  # [num_kv_heads, num_keys, head_dim padded to a power of two] int8; 0 past a row's end
    steps: torch.Tensor  # [num_kv_heads, num_keys / 64] float32
    means: torch.Tensor  # [num_rows, num_kv_heads, padded head_dim] float32: k̄, of which the scores know nothing
    starts: torch.Tensor  # [num_rows] int32: a row's first key


def smooth_keys(cache: PagedCache, rows: Rows, int8_heads: torch.Tensor | None, num_heads: int) -> SmoothKeys:
    """``int8_heads`` [num_heads] uint8: the query heads that will read the result; None is all of them."""
    num_kv_heads, head_dim, device = cache.num_kv_heads, cache.head_dim, rows.device
    block_d, group = triton.next_power_of_2(head_dim), num_heads // num_kv_heads
    starts = [0]
    for seq_len in rows.seq_lens:
        starts.append(starts[-1] + ceil_div(seq_len, ALIGN_TOKENS) * ALIGN_TOKENS)
    if "smooth_keys" not in rows.state:
        rows.state["smooth_keys"] = to_device(starts[:-1], torch.int32, device)
    smooth = SmoothKeys(
        torch.empty(num_kv_heads, starts[-1], block_d, dtype=torch.int8, device=device),
        torch.empty(num_kv_heads, starts[-1] // STEP_TOKENS.value, dtype=torch.float32, device=device),
        torch.empty(rows.num_rows, num_kv_heads, block_d, dtype=torch.float32, device=device),
        rows.state["smooth_keys"],
    )
    keys = key_args(cache, rows.block_table)
    shape = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "GROUP": group, "HEADS": triton.next_power_of_2(group)}
    for row, seq_len in enumerate(rows.seq_lens):
        num_splits = ceil_div(seq_len, SPLIT_TOKENS)
        sums = torch.empty(num_splits, num_kv_heads, block_d, dtype=torch.float32, device=device)
        _key_sums_kernel[(num_splits, num_kv_heads)](
            keys, int8_heads, sums, row, seq_len, **shape, SPLIT=SPLIT_TOKENS, BLOCK_N=64
        )
        torch.div(sums.sum(0), seq_len, out=smooth.means[row])
        _round_keys_kernel[((starts[row + 1] - starts[row]) // STEP_TOKENS.value, num_kv_heads)](
            keys,
            int8_heads,
            smooth.means[row],
            smooth.integers,
            smooth.steps,
            row,
            seq_len,
            starts[row],
            starts[-1],
            **shape,
        )
    return smooth


@triton.jit
def quantize(b_x):
    """(integers, step) of a block of float32 vectors with one scale, to the nearest."""
    step = tl.maximum(tl.max(tl.abs(b_x)), TINY) / INT8_MAX
    return tl.floor(b_x / step + 0.5).to(tl.int8), step


@triton.jit
def _is_read(int8_heads, i_kv, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Whether any 8-bit head reads this kv head."""
    if int8_heads is None:
        return True
    else:
        o_h = tl.arange(0, HEADS)
        b_flag = tl.load(int8_heads + i_kv * GROUP + o_h, mask=o_h < GROUP, other=0)
        return tl.max(b_flag.to(tl.int32), 0) > 0


@triton.jit
def _load_keys(keys, i_row, i_kv, o_n, seq_len, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys at the positions ``o_n`` as float32 [len(o_n), BLOCK_D]; 0 from ``seq_len`` on."""
    o_d = tl.arange(0, BLOCK_D)
    table = keys.block_table + tl.cast(i_row, tl.int64) * keys.stride_table
    o_k = key_offsets(table, o_n, o_n < seq_len, keys.page_size, keys.stride_page, keys.stride_token)
    o_k = i_kv.to(tl.int64) * keys.stride_head + o_k[:, None] + o_d[None, :]
    return tl.load(keys.k + o_k, mask=(o_n < seq_len)[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=VARYING)
def _key_sums_kernel(
    keys, int8_heads, sums, i_row, seq_len,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum of up to SPLIT keys of one kv head."""
    i_split, i_kv = tl.program_id(0), tl.program_id(1)
    if _is_read(int8_heads, i_kv, GROUP, HEADS):
        b_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for i in range(i_split * SPLIT, tl.minimum(i_split * SPLIT + SPLIT, seq_len), BLOCK_N):
            b_sum += _load_keys(keys, i_row, i_kv, i + tl.arange(0, BLOCK_N), seq_len, HEAD_DIM, BLOCK_D)
        o_sum = (i_split * tl.num_programs(1) + i_kv) * BLOCK_D + tl.arange(0, BLOCK_D)
        tl.store(sums + o_sum, tl.sum(b_sum, 0))


@triton.jit(do_not_specialize=VARYING)
def _round_keys_kernel(
    keys, int8_heads, means, integers, steps, i_row, seq_len, start, num_keys,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Up to STEP_TOKENS keys of one kv head in 8 bits, zeros past the row's end."""
    i_n, i_kv = tl.program_id(0), tl.program_id(1)
    if _is_read(int8_heads, i_kv, GROUP, HEADS):
        o_n = i_n * STEP_TOKENS + tl.arange(0, STEP_TOKENS)
        o_d = tl.arange(0, BLOCK_D)
        b_k = _load_keys(keys, i_row, i_kv, o_n, seq_len, HEAD_DIM, BLOCK_D)
        b_mean = tl.load(means + i_kv * BLOCK_D + o_d)
        b_int, step = quantize(tl.where((o_n < seq_len)[:, None], b_k - b_mean[None, :], 0.0))
        first = i_kv.to(tl.int64) * num_keys + start
        tl.store(integers + (first + o_n)[:, None] * BLOCK_D + o_d[None, :], b_int)
        tl.store(steps + first // STEP_TOKENS + i_n, step)
