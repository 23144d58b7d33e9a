# SPDX-License-Identifier: Apache-2.0
"""Device functions for exact top-k of long rows.

Floats become integers of the same order, whose bits yield the k-th largest. This threshold then determines the values
to keep in each chunk, with ties in order of index.

Nothing is sorted, nothing is copied to the host, and the result is deterministic.
"""

import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant

ALIGNED = Constant(64)
"""Rows of scores are padded to a multiple of this."""


@triton.jit
def ordered_bits(b_values):
    """Convert float32 values to uint32 values that sort in the same order."""
    b_bits = (b_values + 0.0).to(tl.uint32, bitcast=True)  # adding 0 turns -0 into 0
    return tl.where((b_bits >> 31) != 0, ~b_bits, b_bits | 0x80000000)


@triton.jit
def load_bits(row, start, length, CHUNK: tl.constexpr):
    """Load ``ordered_bits`` of row[start : start + CHUNK]: 0 from ``length``."""
    o_n = start + tl.arange(0, CHUNK)
    b_values = tl.load(row + o_n, mask=o_n < (length + ALIGNED - 1) // ALIGNED * ALIGNED, other=0.0)
    return tl.where(o_n < length, ordered_bits(b_values), 0)


@triton.jit
def kept_in_chunk(b_bits, threshold, num_ties, above_seen, ties_seen):
    """Flag the values of a chunk that a threshold keeps, with ties in order of index."""
    b_above = b_bits > threshold
    b_tie = (b_bits == threshold) & (b_bits != 0)
    b_both = tl.cumsum(b_above.to(tl.int32) + (b_tie.to(tl.int32) << 16), 0)  # a chunk is shorter than 2 ** 15
    b_ties = ties_seen + (b_both >> 16)
    b_kept_upto = above_seen + (b_both & 0xFFFF) + tl.minimum(b_ties, num_ties)
    b_kept = b_above | (b_tie & (b_ties <= num_ties))
    return b_kept, b_kept_upto, above_seen + tl.sum(b_above.to(tl.int32), 0), ties_seen + tl.sum(b_tie.to(tl.int32), 0)
