# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of long rows on the device: the k-th largest value by its bits, equal values by lowest index first.

Floats are mapped to integers of the same order, whose digits in base 4 are found from the highest down: each pass over
the row counts the values that reach three thresholds. The row is read up to 16 times and stays in a cache; nothing is
sorted, nothing goes back to the host, and the result is the same however often it is computed.
"""

import triton
import triton.language as tl

ALIGNED = tl.constexpr(64)
"""Rows of scores are padded to a multiple of this."""


@triton.jit
def ordered_bits(b_values):
    """float32 as uint32 of the same order, at least 1; values may be of either sign or infinite, not NaN."""
    b_bits = (b_values + 0.0).to(tl.uint32, bitcast=True)  # adding 0 turns -0 into 0
    return tl.where((b_bits >> 31) != 0, ~b_bits, b_bits | 0x80000000)


@triton.jit
def load_bits(row, start, length, forced, CHUNK: tl.constexpr):
    """``ordered_bits`` of row[start : start + CHUNK]: the first ``forced`` as if infinite, 0 from ``length`` on.

    The row must be readable up to ``length`` rounded up to ALIGNED, so that its loads can be wide.
    """
    o_n = start + tl.arange(0, CHUNK)
    b_values = tl.load(row + o_n, mask=o_n < (length + ALIGNED - 1) // ALIGNED * ALIGNED, other=0.0)
    b_bits = ordered_bits(tl.where(o_n < forced, float("inf"), b_values))
    return tl.where(o_n < length, b_bits, 0)


@triton.jit
def kth_largest(row, length, k, forced, CHUNK: tl.constexpr):
    """(threshold, ties): the k largest of row[:length] are those above the threshold and the first ``ties`` equal ones.

    Stops as soon as exactly k values reach the threshold; with k >= length all are kept.
    """
    threshold = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    num_reaching, num_above = length, 0  # values >= threshold, values >= threshold + 4 · step
    while (step > 0) & (num_reaching > k):
        b_1 = tl.zeros([CHUNK], tl.int32)
        b_2 = tl.zeros([CHUNK], tl.int32)
        b_3 = tl.zeros([CHUNK], tl.int32)
        for start in range(0, length, CHUNK):
            b_bits = load_bits(row, start, length, forced, CHUNK)
            b_1 += (b_bits >= threshold + step).to(tl.int32)
            b_2 += (b_bits >= threshold + 2 * step).to(tl.int32)
            b_3 += (b_bits >= threshold + 3 * step).to(tl.int32)
        n_1, n_2, n_3 = tl.sum(b_1, 0), tl.sum(b_2, 0), tl.sum(b_3, 0)
        digit = (n_1 >= k).to(tl.int32) + (n_2 >= k).to(tl.int32) + (n_3 >= k).to(tl.int32)
        num_above = tl.where(digit == 3, num_above, tl.where(digit == 2, n_3, tl.where(digit == 1, n_2, n_1)))
        num_reaching = tl.where(digit == 3, n_3, tl.where(digit == 2, n_2, tl.where(digit == 1, n_1, num_reaching)))
        threshold += step * digit.to(tl.uint32)
        step = step >> 2
    settled = num_reaching <= k
    return tl.where(settled, tl.maximum(threshold, 1) - 1, threshold), tl.where(settled, 0, k - num_above)


@triton.jit
def kept_in_chunk(b_bits, threshold, num_ties, above_seen, ties_seen):
    """Flags of the kept ones of a chunk, how many are kept up to and with each, and the two sums for the next chunk.

    ``above_seen`` and ``ties_seen`` count the values above and at the threshold in the chunks before, 0 at first.
    """
    b_above = b_bits > threshold
    b_tie = (b_bits == threshold) & (b_bits != 0)
    b_both = tl.cumsum(b_above.to(tl.int32) + (b_tie.to(tl.int32) << 16), 0)  # a chunk is shorter than 2 ** 15
    b_ties = ties_seen + (b_both >> 16)
    b_kept_upto = above_seen + (b_both & 0xFFFF) + tl.minimum(b_ties, num_ties)
    b_kept = b_above | (b_tie & (b_ties <= num_ties))
    return b_kept, b_kept_upto, above_seen + tl.sum(b_above.to(tl.int32), 0), ties_seen + tl.sum(b_tie.to(tl.int32), 0)
