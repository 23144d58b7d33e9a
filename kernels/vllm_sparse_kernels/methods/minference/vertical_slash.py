# SPDX-License-Identifier: Apache-2.0
"""Vertical-slash heads of MInference (arXiv:2407.02490), Algorithms 2 and 4.

Â is the softmax of the last 64 queries over all keys. The k_v keys with the largest column sums are kept as stripes
("verticals"). The k_s offsets ``query position - key position`` with the largest diagonal sums are kept as blocks
("slashes").

* last_queries.py computes the sums, and radix.py finds exactly the k_v and k_s largest sums.
* Algorithm 4 merges points and ranges one after the other for each row of blocks. Here the kept slashes become running
  counts: a tile at positions [p, p'] keeps the key block [s, e] iff a kept offset lies in [max(p - e, 0), p' - s],
  which takes one subtraction. The result is the same, for all blocks of a tile at once.
* All rows of a step, and heads with different parameters, are selected together.

Deviations from the paper:

* Blocks lie at absolute positions, while the paper's blocks begin where a slash enters the row. Rows of blocks are
  tiles of 128 queries, while the paper's have 64. The union of the touched blocks is therefore larger: slightly if the
  kept slashes are neighbours, and 1.4 to 3 times the density of the authors' code if they are scattered.
* The last queries are those of the row's chunk in this step, fewer than 64 if the chunk is shorter.
* Diagonal blocks are always kept.
* The authors' code gives the first 30 columns and the last 100 diagonals infinite sums before it takes the largest, so
  that they count among k_v and k_s. The paper's text does not. ``forced_verticals`` and ``forced_slashes`` follow the
  code; 0 follows the paper. The code also raises k_v to at least 30 and k_s to at least 50. This implementation does
  not.
* Sums are equal if ten bits of their mantissas agree (radix.py). Ties go to the earliest key and the nearest diagonal.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.index import StripeLayout
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.last_queries import Estimate, Sums
from vllm_sparse_kernels.selection.lines import Lines, select_lines
from vllm_sparse_kernels.selection.parameters import require
from vllm_sparse_kernels.selection.radix import (
    CHUNK,
    DIGITS,
    MOST_CHUNKS,
    UNSPECIALIZED,
    digits_of,
    job_of,
    load_count_keys,
    threshold_of,
)


@dataclass(frozen=True)
class VerticalSlash(Method):
    """Parameters of vertical-slash heads: k_v ``vertical_tokens``, k_s ``slash_tokens``, last_q ``last_queries``.

    The defaults are those of the authors' code for heads without a searched pattern. Forced lines count among k_v and
    k_s.
    """

    differing = ("vertical_tokens", "slash_tokens", "forced_verticals", "forced_slashes")

    vertical_tokens: int = 1000
    slash_tokens: int = 6096
    last_queries: int = 64
    forced_verticals: int = 30
    forced_slashes: int = 100

    def __post_init__(self) -> None:
        for field in ("vertical_tokens", "slash_tokens", "forced_verticals", "forced_slashes"):
            require(getattr(self, field) >= 0, field, getattr(self, field), ">= 0")
        require(1 <= self.last_queries <= 64, "last_queries", self.last_queries, "1 to 64")

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        return StripeLayout.per_tile(rows, self.vertical_tokens)

    def select(self, call: Call) -> None:
        select_lines(call, Estimate(self.last_queries, band=1), keep_largest)


def keep_largest(call: Call, sums: Sums) -> Lines:
    """Keep the k_v largest column sums and the k_s largest diagonal sums of each head and row."""
    index, empty = call.index, call.workspace.empty
    counts = call.parameters("vertical_tokens", "slash_tokens")
    first = call.parameters("forced_verticals", "forced_slashes")
    rows, num_rows = index.rows, sums.end_row - sums.first_row
    most_verticals = max(method.vertical_tokens for method in call.heads.methods)
    most = min(most_verticals, max(rows.seq_lens[sums.first_row : sums.end_row]))
    lines = Lines(
        columns=empty(num_rows, sums.num_selected, max(1, most), dtype=torch.int32),
        num_columns=empty(num_rows, sums.num_selected, dtype=torch.int32),
        whole=None,
        bands_upto=empty(sums.num_selected, sums.capacity, dtype=torch.int32),
    )
    digits = digits_of(index, sums, counts, first)
    chunks = digits.weights.shape[3]
    _keep_largest_kernel[(chunks, 2 * sums.num_selected, num_rows)](
        *sums.args(rows), counts, first, digits, chunks, lines, lines.columns.shape[2],
        num_warps=8, maxnreg=128,
    )  # fmt: skip
    return lines


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _keep_largest_kernel(
    sums, num_selected, first_row, num_rows, capacity, counts, forced,
    digits, chunks, lines, max_columns,
):  # fmt: skip
    """Write the kept lines of one chunk and job: places of verticals, or running counts of slashes.

    Grid: (chunks, 2 n jobs, rows). Bound by memory: it reads each sum once.

    Args:
        counts: [2 n] float32, number of kept lines of each job.
        forced: [2 n] float32, number of first values that count as infinite.
    """
    i_chunk, i_job = tl.program_id(0), tl.program_id(1)
    is_slash, i_selected = i_job >= num_selected, i_job % num_selected
    place, length, first, end, used, i_row_job = job_of(sums, num_selected, first_row, num_rows, capacity, 1)
    if first >= end:
        return
    goal = tl.minimum(tl.load(counts + i_job).to(tl.int32), length)
    threshold, num_ties, digit, b_w = threshold_of(digits, i_row_job, chunks, used)
    # Counts of the previous chunks.
    o_c, o_digit = tl.arange(0, MOST_CHUNKS), tl.arange(0, DIGITS)
    b_before = tl.sum(tl.where((o_c < i_chunk)[:, None], b_w, 0), 0)
    above = tl.sum(tl.load(digits.above + i_row_job * chunks + o_c, mask=o_c < i_chunk, other=0), 0)
    above += tl.sum(tl.where(o_digit > digit, b_before, 0), 0)
    ties = tl.sum(tl.where(o_digit == digit, b_before, 0), 0)

    num_forced = tl.load(forced + i_job).to(tl.int32)
    i_list = (tl.program_id(2) * num_selected + i_selected).to(tl.int64)
    # The sums of slashes follow those of columns.
    slashes = lines.bands_upto + (place - num_selected.to(tl.int64) * capacity)
    for start in range(first, end, CHUNK):
        b_key = load_count_keys(sums.totals + place, start, end, num_forced)
        b_kept, b_upto, above, ties = _kept_in_chunk(b_key, threshold, num_ties, above, ties)
        o_n = start + tl.arange(0, CHUNK)
        if is_slash:
            tl.store(slashes + o_n, b_upto, mask=o_n < end)
        else:
            tl.store(lines.columns + i_list * max_columns + b_upto - 1, o_n, mask=b_kept)
    if (i_chunk == 0) & (is_slash == 0):
        tl.store(lines.num_columns + i_list, goal)


@triton.jit
def _kept_in_chunk(b_bits, threshold, num_ties, above_seen, ties_seen):
    """Flag the values of a chunk that a threshold keeps, with ties in order of index."""
    b_above = b_bits > threshold
    b_tie = (b_bits == threshold) & (b_bits != 0)
    b_both = tl.cumsum(b_above.to(tl.int32) + (b_tie.to(tl.int32) << 16), 0)  # a chunk is shorter than 2 ** 15
    b_ties = ties_seen + (b_both >> 16)
    b_kept_upto = above_seen + (b_both & 0xFFFF) + tl.minimum(b_ties, num_ties)
    b_kept = b_above | (b_tie & (b_ties <= num_ties))
    return b_kept, b_kept_upto, above_seen + tl.sum(b_above.to(tl.int32), 0), ties_seen + tl.sum(b_tie.to(tl.int32), 0)
