# SPDX-License-Identifier: Apache-2.0
"""Selection of a kv head's channels with the largest weight."""

import triton
import triton.language as tl


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
