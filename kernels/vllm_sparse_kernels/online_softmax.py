# SPDX-License-Identifier: Apache-2.0
"""Steps of online softmaxes, in base 2, in Triton kernels."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from vllm_sparse_kernels.paged import widen


class Softmax(NamedTuple):
    """The online softmax of a program's queries."""

    b_acc: Any  # [queries, head_dim] float32, Σ 2^(S − max) V
    b_max: Any  # [queries] float32, largest scaled score; -inf before the first key
    b_sum: Any  # [queries] float32, Σ 2^(S − max)


@triton.jit
def finite_maximum(b_max):
    """Replace maxima of −∞ (there were no scores) with 0, because −∞ minus −∞ is not a number."""
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def softmax_step(b_s, b_v, scale, margin, softmax, MAY_SEE_NONE: tl.constexpr = False):
    """Process one step of attention, with unscaled scores [M, N] and values [N, D].

    ``scale`` converts scores to base 2. The maximum is stored scaled, so that each exponent takes one fused
    multiply-add. With MAY_SEE_NONE, a query may not have seen any key yet. ``margin`` is None without skips. The
    exponentials of every step are added to the sum. The product is skipped if no local maximum comes within ``margin``
    of its query's running maximum; then no maximum has changed, and the accumulator stays as it is.
    """
    b_v = widen(b_v)
    b_max = tl.maximum(softmax.b_max, tl.max(b_s, 1) * scale)
    b_finite = b_max
    if MAY_SEE_NONE:
        b_finite = finite_maximum(b_max)
    b_decay = tl.exp2(softmax.b_max - b_finite)
    b_p = tl.exp2(b_s * scale - b_finite[:, None])
    b_sum = softmax.b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = softmax.b_acc
    if margin is None:
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="ieee")
    else:
        # All queries of a tile are tested together, because all warps of a Triton program take the same branch. The
        # paper tests the queries of a warp (16 or 32) and therefore skips more. Two products of 64 queries would not
        # help: the two groups of warps would share each half, and its exponentials would cross between them.
        if tl.max(tl.max(b_s, 1) * scale - b_max, 0) >= margin:
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="ieee")
    return Softmax(b_acc, b_max, b_sum)


@triton.jit
def add_exponentials(b_max, b_sum, b_s):
    """Add scores [M, N] in base 2 to each query's maximum, -inf before its first key, and its sum of exponentials."""
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_finite = finite_maximum(b_new)
    b_sum = b_sum * tl.exp2(b_max - b_finite) + tl.sum(tl.exp2(b_s - b_finite[:, None]), 1)
    return b_new, b_sum
