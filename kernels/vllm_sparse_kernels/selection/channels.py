# SPDX-License-Identifier: Apache-2.0
"""Selection of a kv head's channels with the largest weight, and vectors reduced to these channels."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class RoundedFormat(NamedTuple):
    """Format of rounded queries and keys."""

    kept_d: int  # channels that are multiplied
    dtype: torch.dtype


@triton.jit
def keep_heaviest(channels, b_weight, HEAD_DIM: tl.constexpr, KEPT_D: tl.constexpr):
    """Store the KEPT_D channels with the largest weights, in ascending order; ties go to lower channels."""
    o_d = tl.arange(0, b_weight.shape[0])
    b_weight = tl.where(b_weight == b_weight, b_weight, 0.0)  # 0 · infinity
    b_weight = tl.where(o_d < HEAD_DIM, b_weight, -1.0)
    b_equal = (b_weight[None, :] == b_weight[:, None]) & (o_d[None, :] < o_d[:, None])
    b_rank = tl.sum(((b_weight[None, :] > b_weight[:, None]) | b_equal).to(tl.int32), 1)
    b_kept = b_rank < KEPT_D
    tl.store(channels + tl.cumsum(b_kept.to(tl.int32), 0) - 1, o_d, mask=b_kept)


@triton.jit
def kept_of(b_x, channels, KEPT_D: tl.constexpr):
    """Return the kept channels of some vectors."""
    BLOCK_D: tl.constexpr = b_x.shape[1]
    if KEPT_D == BLOCK_D:
        return b_x.to(tl.float32)
    else:
        # ptxas of Triton 3.6 assembles products of 32 columns with a wrong descriptor, so products have at least 64.
        COLUMNS: tl.constexpr = KEPT_D if KEPT_D > 64 else 64
        o_c = tl.arange(0, COLUMNS)
        b_columns = tl.load(channels + o_c, mask=o_c < KEPT_D, other=-1)
        # A product with a 0/1 matrix that has a single 1 in each column moves elements without changing them.
        b_ones = (tl.arange(0, BLOCK_D)[:, None] == b_columns[None, :]).to(b_x.dtype)
        b_kept = tl.dot(b_x, b_ones, input_precision="ieee")
        return tl.sum(tl.reshape(b_kept, [b_x.shape[0], COLUMNS // KEPT_D, KEPT_D]), 1)


@triton.jit
def load_kept(x, channels, BLOCK_D: tl.constexpr, KEPT_D: tl.constexpr):
    """Load the kept channels of a vector."""
    o_c = tl.arange(0, KEPT_D)
    return tl.load(x + (tl.load(channels + o_c) if KEPT_D < BLOCK_D else o_c))
