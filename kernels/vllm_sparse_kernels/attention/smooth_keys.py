# SPDX-License-Identifier: Apache-2.0
"""8-bit keys for ``attend``, by SageAttention (Zhang et al., arXiv 2410.02367), as in SpargeAttn and SALE.

Equation 6 and Algorithm 1, kernel SAGEAttn-B: the mean over the row is subtracted from the keys. It shifts all scores
of a query equally, so it does not change the softmax. The keys then become integers −127 … 127, with one scale for each
block of 64 keys of a kv head: δ = max |k − k̄| / 127. (``attend`` itself gives queries one scale per tile of 128.)

The mean is over the keys that this step sees, so the last bits of the rounding depend on the chunking.

Each call of ``attend`` quantises the keys once, from the paged cache into a workspace with one byte for each element of
the rows' keys, row after row, and of 64 more.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.paged import PagedCache, key_args, load_keys
from vllm_sparse_kernels.rows import KEY_ALIGN, Rows, ceil_div
from vllm_sparse_kernels.selection.key_sums import mean_keys
from vllm_sparse_kernels.selection.lists import load_row
from vllm_sparse_kernels.vectors import load_vector, vector_pointers
from vllm_sparse_kernels.workspace import Workspace

SCALE_TOKENS = KEY_ALIGN
"""Keys that share a scale. Each row begins with a scale."""

INT8_MAX = Constant(127.0)
TINY = Constant(1e-20)  # replaces the largest magnitude of a block of zeros


class SmoothKeys(NamedTuple):
    """8-bit keys of all rows, each filled up with zeros to a multiple of 64 keys. 64 undefined keys follow."""

    num_keys: int  # a multiple of 64, so that no batch requires a new variant of a kernel
    integers: torch.Tensor  # [num_kv_heads, num_keys, head_dim padded to a power of two] int8
    scales: torch.Tensor  # [num_kv_heads, num_keys / 64] float32
    means: torch.Tensor  # [num_rows, num_kv_heads, padded head_dim] float32: k̄, which scores do not include
    rows: torch.Tensor  # [num_rows + 1, 4] int32, ``Rows.row_table``: a row's first key is at ``key_starts``


def smooth_keys(cache: PagedCache, rows: Rows, workspace: Workspace) -> SmoothKeys:
    """Quantise the keys of all rows to 8 bits."""
    num_kv_heads, block_d = cache.num_kv_heads, cache.padded_head_dim
    num_keys = rows.key_starts[-1] + SCALE_TOKENS.value  # a block of 128 keys may reach past the last row's keys
    smooth = SmoothKeys(
        num_keys,
        workspace.empty(num_kv_heads, num_keys, block_d, dtype=torch.int8),
        workspace.empty(num_kv_heads, num_keys // SCALE_TOKENS.value),
        mean_keys(cache, rows, workspace),
        rows.row_table,
    )
    smooth.scales[:, -1].zero_()  # of the 64 undefined keys
    _round_keys_kernel[(ceil_div(max(rows.seq_lens), SCALE_TOKENS.value), num_kv_heads, rows.num_rows)](
        key_args(cache, rows.block_table), smooth, HEAD_DIM=cache.head_dim, BLOCK_D=block_d
    )
    return smooth


@triton.jit
def quantize(b_x):
    """Round a block of vectors with one scale, to the nearest."""
    scale = tl.maximum(tl.max(tl.abs(b_x)), TINY) / INT8_MAX
    return tl.floor(b_x / scale + 0.5).to(tl.int8), scale


@triton.jit
def _round_keys_kernel(keys, smooth, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Round up to SCALE_TOKENS keys of one kv head to 8 bits, with zeros past the row's end.

    Grid: (blocks of 64 keys of the longest row, kv heads, rows). Bound by memory: it reads each key once and writes
    half as many bytes.
    """
    i_n, i_kv, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, seq_len, key_start = load_row(smooth.rows, i_row)
    if i_n * SCALE_TOKENS < seq_len:
        o_n = i_n * SCALE_TOKENS + tl.arange(0, SCALE_TOKENS)
        b_k = load_keys(keys, i_row, i_kv, o_n, seq_len, HEAD_DIM, BLOCK_D).to(tl.float32)
        b_mean = load_vector(smooth.means, i_row * tl.num_programs(1) + i_kv, BLOCK_D)
        b_int, scale = quantize(tl.where((o_n < seq_len)[:, None], b_k - b_mean[None, :], 0.0))
        first = i_kv.to(tl.int64) * smooth.num_keys + key_start
        tl.store(vector_pointers(smooth.integers, first + o_n, BLOCK_D), b_int)
        tl.store(smooth.scales + first // SCALE_TOKENS + i_n, scale)
