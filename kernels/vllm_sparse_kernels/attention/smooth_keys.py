# SPDX-License-Identifier: Apache-2.0
"""8-bit keys for ``attend``, by SageAttention (Zhang et al., arXiv 2410.02367), as in SpargeAttn and SALE.

Equation 6 and Algorithm 1, kernel SAGEAttn-B: the mean over the row is subtracted from the keys. It shifts all scores
of a query equally, so it does not change the softmax. The keys then become integers −127 … 127, with one scale for each
block of 64 keys of a kv head: δ = max |k − k̄| / 127. (``attend`` itself gives queries one scale per tile of 128.)

The mean is over the keys that this step sees, so the last bits of the rounding depend on the chunking.

Each call of ``attend`` quantises the keys once, from the paged cache into a workspace with one byte for each element of
the rows' keys, row after row.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.paged import PagedCache, key_args, load_keys
from vllm_sparse_kernels.rows import Rows, ceil_div, to_device
from vllm_sparse_kernels.selection.key_sums import key_sums
from vllm_sparse_kernels.workspace import Workspace

SCALE_TOKENS = Constant(64)
"""Keys that share a scale."""

ALIGN_TOKENS = 128
"""A row's keys are padded to whole blocks of either size."""

INT8_MAX = Constant(127.0)
TINY = Constant(1e-20)  # replaces the largest magnitude of a block of zeros

UNSPECIALIZED = ("i_row", "seq_len", "start", "num_keys")
"""Kernel arguments that change from step to step and must not cause new variants of a kernel."""


class SmoothKeys(NamedTuple):
    """8-bit keys of all rows. Parts of kv heads that no 8-bit head reads are undefined."""

    integers: torch.Tensor  # [num_kv_heads, num_keys, head_dim padded to a power of two] int8; 0 past a row's end
    scales: torch.Tensor  # [num_kv_heads, num_keys / 64] float32
    means: torch.Tensor  # [num_rows, num_kv_heads, padded head_dim] float32: k̄, which scores do not include
    starts: torch.Tensor  # [num_rows] int32: a row's first key


def smooth_keys(
    cache: PagedCache, rows: Rows, int8_heads: torch.Tensor | None, num_heads: int, workspace: Workspace
) -> SmoothKeys:
    """Quantise the keys of all rows to 8 bits."""
    num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
    block_d, group = triton.next_power_of_2(head_dim), num_heads // num_kv_heads
    starts = [*accumulate((ceil_div(seq_len, ALIGN_TOKENS) * ALIGN_TOKENS for seq_len in rows.seq_lens), initial=0)]
    smooth = SmoothKeys(
        workspace.empty(num_kv_heads, starts[-1], block_d, dtype=torch.int8),
        workspace.empty(num_kv_heads, starts[-1] // SCALE_TOKENS.value),
        workspace.empty(rows.num_rows, num_kv_heads, block_d),
        rows.once(smooth_keys, lambda: to_device(starts[:-1], torch.int32, rows.device)),
    )
    keys = key_args(cache, rows.block_table)
    shape = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "GROUP": group, "HEADS": triton.next_power_of_2(group)}
    with workspace.frame():
        sums, splits = key_sums(cache, rows, workspace, moments=1, period=1, groups=16, num_warps=4)
        for row, seq_len in enumerate(rows.seq_lens):
            torch.sum(sums[splits.starts[row] : splits.starts[row + 1], :, 0], 0, out=smooth.means[row])
            smooth.means[row].div_(seq_len)
    for row, seq_len in enumerate(rows.seq_lens):
        _round_keys_kernel[((starts[row + 1] - starts[row]) // SCALE_TOKENS.value, num_kv_heads)](
            keys, int8_heads, smooth.means[row], smooth.integers, smooth.scales, row, seq_len, starts[row], starts[-1],
            **shape,
        )  # fmt: skip
    return smooth


@triton.jit
def quantize(b_x):
    """Round a block of vectors with one scale, to the nearest."""
    scale = tl.maximum(tl.max(tl.abs(b_x)), TINY) / INT8_MAX
    return tl.floor(b_x / scale + 0.5).to(tl.int8), scale


@triton.jit
def _is_read(int8_heads, i_kv, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Return whether any 8-bit head reads this kv head."""
    if int8_heads is None:
        return True
    else:
        o_h = tl.arange(0, HEADS)
        b_flag = tl.load(int8_heads + i_kv * GROUP + o_h, mask=o_h < GROUP, other=0)
        return tl.max(b_flag.to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _round_keys_kernel(
    keys, int8_heads, means, integers, scales, i_row, seq_len, start, num_keys,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Round up to SCALE_TOKENS keys of one kv head to 8 bits, with zeros past the row's end.

    Grid: (blocks of 64 keys of one row, kv heads). Bound by memory: it reads each key once and writes half as many
    bytes.

    Args:
        int8_heads: [num_heads] uint8, heads that read the result; None: all.
        means: [kv heads, BLOCK_D] float32, the row's mean key.
        integers: [kv heads, num_keys, BLOCK_D] int8; written.
        scales: [kv heads, num_keys / 64] float32; written.
    """
    i_n, i_kv = tl.program_id(0), tl.program_id(1)
    if _is_read(int8_heads, i_kv, GROUP, HEADS):
        o_n = i_n * SCALE_TOKENS + tl.arange(0, SCALE_TOKENS)
        o_d = tl.arange(0, BLOCK_D)
        b_k = load_keys(keys, i_row, i_kv, o_n, seq_len, HEAD_DIM, BLOCK_D).to(tl.float32)
        b_mean = tl.load(means + i_kv * BLOCK_D + o_d)
        b_int, scale = quantize(tl.where((o_n < seq_len)[:, None], b_k - b_mean[None, :], 0.0))
        first = i_kv.to(tl.int64) * num_keys + start
        tl.store(integers + (first + o_n)[:, None] * BLOCK_D + o_d[None, :], b_int)
        tl.store(scales + first // SCALE_TOKENS + i_n, scale)
