# SPDX-License-Identifier: Apache-2.0
"""8-bit keys as the engine ``portable`` reads them: SageAttention's, in SpargeAttn and SALE (``smooth_keys.py``)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.attention.smooth_keys import SCALE_TOKENS
from vllm_sparse_kernels.vectors import vector_pointers


class Int8Keys(NamedTuple):
    """The 8-bit keys of one row and kv head."""

    integers: Any  # as in SmoothKeys
    scales: Any
    first_key: Any  # number of the row's first key in ``integers``
    query_scale: Any  # scale of the queries' integers, times the softmax's scale


@triton.jit
def load_int8_block(int8_keys, i_block, SHAPE):
    """Load the 8-bit keys [BLOCK_N, BLOCK_D] of a block, and the scale of each key's products."""
    o_n = tl.arange(0, SHAPE.BLOCK_N)
    i_key = int8_keys.first_key + i_block * SHAPE.BLOCK_N
    b_k = tl.load(vector_pointers(int8_keys.integers, (i_key + o_n).to(tl.int64), SHAPE.BLOCK_D))
    scales = int8_keys.scales + i_key // SCALE_TOKENS
    b_dot_scale = tl.full([SHAPE.BLOCK_N], 0.0, tl.float32) + tl.load(scales) * int8_keys.query_scale
    if SHAPE.BLOCK_N > SCALE_TOKENS:
        second_scale = tl.load(scales + 1) * int8_keys.query_scale
        b_dot_scale = tl.where(o_n < SCALE_TOKENS, b_dot_scale, second_scale)
    return b_k, b_dot_scale


@triton.jit
def load_int8_stripes(int8_keys, b_n, SHAPE):
    """Load the 8-bit keys [STRIPES, BLOCK_D] at positions ``b_n``, and the scale of each key's products."""
    b_key = int8_keys.first_key + b_n
    b_k = tl.load(vector_pointers(int8_keys.integers, b_key.to(tl.int64), SHAPE.BLOCK_D))
    b_dot_scale = tl.load(int8_keys.scales + b_key // SCALE_TOKENS) * int8_keys.query_scale
    return b_k, b_dot_scale
