# SPDX-License-Identifier: Apache-2.0
"""FlexPrefill's vertical-slash (arXiv:2502.20766), the fallback of SharePrefill (arXiv:2505.19578, Algorithm 5).

Â is the softmax of the chunk's last 64 queries over all keys. The data determine the number of kept lines: the fewest
columns that hold γ of Â's mass, and the fewest diagonals that hold γ of it. Columns are kept as stripes, diagonals as
blocks.

Deviations from Algorithm 5:

* Diagonals are those of blocks of 64 queries and keys. A tile computes whole blocks: one diagonal of keys costs three
  blocks, as much as two diagonals of blocks. If chosen singly, the diagonals of diffuse heads lie everywhere and keep
  nearly all blocks: on a trained model at γ = 0.9 and 8K tokens, bands of 64 reduced density from 0.36 to 0.26 and
  recall from 0.97 to 0.93. Diagonals of blocks and bands of diagonals lie on the same curve of recall against density.
  (The authors' code also sorts diagonals of blocks, but keeps as many of them as the number of single diagonals that
  reach γ. Their mass is less than γ: recall 0.86 at density 0.20.)
* A tile keeps at most ``max_stripes`` stripes (fewer if a row has very many tiles). If a head's columns exceed that,
  the blocks with the most columns are kept whole until the other columns fit. This keeps more keys, never fewer.
* All columns and diagonals that are tied at the threshold are kept. Sums count as tied if their mantissas agree in 10
  bits. The kept sums therefore reach γ, and include every column within a thousandth of the smallest kept column. This
  takes two passes over the sums (radix.py), and exact ties would need four passes.
* The first block and the diagonal blocks are always kept, as in the authors' code.
* The last queries are those of the row's chunk in this step, fewer if the chunk is shorter.
* Columns keep γ of the mass of Â, diagonals keep γ, and both together keep more. If they are reduced until both
  together keep γ, the result lies on the same curve of recall against density.

Two parts are not implemented. The authors' minimal budget of 1,024 keys lies on the same curve at 12K tokens and below
it at 6K. The paper's query-aware heads (its Algorithms 2 and 4), which Algorithm 5 does not have, are about a tenth of
a trained model's heads at τ = 0.1, and lie slightly below that curve.

Beyond the paper, ``estimating: spread`` uses queries that are spread evenly over the chunk, not at its end, at
the same cost. The distance between these queries decides how well the selection covers single queries with their own
targets. Results of code-lm-29m-128k at γ = 0.9: answers inside the prompt, perplexity, density (dense on the longer
prompt: 38, 3.418):

| | last 64 | last 128 | 64 spread | 128 spread | 256 spread |
| --- | --- | --- | --- | --- | --- |
| two prompts of 6,144 tokens, chunks of 4,096 | 25 of 45, 2.855, 0.37 | 26, 2.728, 0.36 | 45 of 45, 2.567, 0.41 | | |
| 12,325 tokens, chunks of 8,192 | | 22 of 38, 3.601, 0.33 | 25, 3.631, 0.36 | 31, 3.543, 0.38 | 36, 3.483, 0.39 |
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.index import StripeLayout
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.rows import KEY_ALIGN, TILE, Rows
from vllm_sparse_kernels.selection.last_queries import MOST_QUERIES, Estimate, Sums, least_shared_bytes
from vllm_sparse_kernels.selection.lines import Lines, select_lines
from vllm_sparse_kernels.selection.lists import append, load_row
from vllm_sparse_kernels.selection.parameters import require
from vllm_sparse_kernels.selection.radix import (
    CHUNK,
    MOST_CHUNKS,
    UNSPECIALIZED,
    digits_of,
    job_of,
    mass_keys,
    threshold_of,
)
from vllm_sparse_kernels.vectors import load_vectors, store_vector

BAND = Constant(64)
"""Queries and keys of the blocks whose diagonals are kept or left out."""

ROW_STRIPES = Constant(1 << 19)
"""Room for the stripes of one row, all of its tiles together: 2 MiB per head."""

FEWEST_STRIPES = Constant(1024)


@dataclass(frozen=True)
class FlexVerticalSlash(Method):
    """γ ``gamma``: the share of the estimated mass that columns hold, and that diagonals hold."""

    differing = ("gamma",)

    gamma: float = 0.9
    max_stripes: int = 8192

    last_queries: int = 64
    """Number of queries from which lines are estimated. Algorithm 3 uses a block of unstated size. FlexPrefill's 128
    queries take twice the time without more right answers (docs/research/quality.md)."""

    estimating: Literal["last", "spread"] = "last"
    """``last``, or beyond the paper ``spread``: ``last_queries`` queries that are spread evenly over the chunk."""

    def __post_init__(self) -> None:
        require(0 < self.gamma <= 1, "gamma", self.gamma, "a share in (0, 1]")
        require(self.max_stripes >= 0, "max_stripes", self.max_stripes, ">= 0")
        require(1 <= self.last_queries <= MOST_QUERIES, "last_queries", self.last_queries, f"1 to {MOST_QUERIES}")
        require(self.estimating in ("last", "spread"), "estimating", self.estimating, "last or spread")

    @property
    def kernel_share(self) -> float:
        """Share for ``digits_of``: γ, or infinity if γ is 1, because only an infinite share keeps values of zero."""
        return self.gamma if self.gamma < 1 else math.inf

    def stripes_of_row(self, rows: Rows, row: int) -> int:
        """Return the number of stripes that a tile of a row may keep. It depends only on the row's size."""
        return min(self.max_stripes, max(FEWEST_STRIPES.value, ROW_STRIPES.value // len(rows.tiles_of(row))))

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        return StripeLayout.of(min(self.stripes_of_row(rows, tile.row), tile.position) for tile in rows.tile_list)

    def least_shared_bytes(self, head_dim: int) -> int:
        return least_shared_bytes(self.last_queries, head_dim)

    def select(self, call: Call, patterns: torch.Tensor | None = None) -> None:
        estimate = Estimate(self.last_queries, BAND.value, self.estimating == "spread")
        select_lines(call, estimate, self.keep_lines, patterns)

    def keep_lines(self, call: Call, sums: Sums) -> Lines:
        """Keep the fewest columns and the fewest diagonals with γ of the mass, of each head and row."""
        index, rows, empty = call.index, call.rows, call.workspace.empty
        num_rows, num_selected = sums.end_row - sums.first_row, sums.num_selected
        most = max(min(self.stripes_of_row(rows, i), rows.seq_lens[i]) for i in range(sums.first_row, sums.end_row))
        lines = Lines(
            columns=empty(num_rows, num_selected, max(1, most), dtype=torch.int32),
            num_columns=empty(num_rows, num_selected, dtype=torch.int32),
            whole=empty(num_selected, sums.capacity // KEY_ALIGN.value, dtype=torch.uint8),
            bands_upto=empty(num_selected, sums.capacity // BAND.value, dtype=torch.int32),
        )
        shares = call.parameters("kernel_share", "kernel_share")  # of columns, and of diagonals
        digits = digits_of(index, sums, shares)
        chunks = digits.weights.shape[3]
        remaining = empty(num_rows, 2 * num_selected, chunks, index.block_tokens, dtype=torch.int32)
        grid = (chunks, 2 * num_selected, num_rows)
        job_args = (*sums.args(rows), digits, chunks, remaining)
        _count_lines_kernel[grid](*job_args, BLOCK_N=index.block_tokens)
        _keep_lines_kernel[grid](*job_args, self.max_stripes, lines, lines.columns.shape[2], BLOCK_N=index.block_tokens)
        return lines


@triton.jit
def _are_kept(row, o_n, end, threshold):
    """Flag the lines ``o_n`` that are kept."""
    return (o_n < end) & (mass_keys(tl.load(row + o_n, mask=o_n < end, other=0.0)) >= threshold)


@triton.jit
def _kept_columns(row, start, end, threshold, BLOCK_N: tl.constexpr):
    """Return keys [blocks, BLOCK_N] from ``start`` on, flags of the kept keys, and their number in each block."""
    o_n = start + tl.reshape(tl.arange(0, CHUNK), [CHUNK // BLOCK_N, BLOCK_N])
    b_kept = _are_kept(row, o_n, end, threshold)
    return o_n, b_kept, tl.sum(b_kept.to(tl.int32), 1)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _count_lines_kernel(
    sums, num_selected, first_row, num_rows, capacity, digits, chunks, remaining, BLOCK_N: tl.constexpr
):
    """Count the lines of one chunk.

    remaining[row, job, chunk, c - 2] becomes the number of columns that remain if blocks with c or more columns are
    kept whole; for bands, the number of kept bands.

    Grid: (chunks, 2 n jobs, rows). Bound by memory: it reads each sum once.

    Args:
        remaining: [num_rows, 2 n, chunks, BLOCK_N] int32; written.
    """
    place, _, first, end, used, i_row_job = job_of(sums, num_selected, first_row, num_rows, capacity, BAND)
    if first >= end:
        return
    threshold, _left, _digit, _weights = threshold_of(digits, i_row_job, chunks, used)
    o_c = tl.arange(0, BLOCK_N)
    b_remaining = tl.zeros([BLOCK_N], tl.int32)
    for start in range(first, end, CHUNK):
        if tl.program_id(1) < num_selected:
            _keys, _kept, b_count = _kept_columns(sums.totals + place, start, end, threshold, BLOCK_N)
            b_remaining += tl.sum(tl.where(b_count[:, None] < 2 + o_c[None, :], b_count[:, None], 0), 0)
        else:
            b_band = _are_kept(sums.totals + place, start + tl.arange(0, CHUNK), end, threshold)
            b_remaining += tl.sum(b_band.to(tl.int32), 0)
    store_vector(remaining, (i_row_job * chunks + tl.program_id(0)).to(tl.int64), b_remaining)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _keep_lines_kernel(
    sums, num_selected, first_row, num_rows, capacity, digits, chunks, remaining, max_stripes, lines,
    max_columns, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the kept lines of one chunk: whole blocks, the other kept columns, and running counts of kept bands.

    Grid: (chunks, 2 n jobs, rows). Bound by memory: it reads each sum once.

    Args:
        remaining: [num_rows, 2 n, chunks, BLOCK_N] int32, of ``_count_lines_kernel``.
    """
    i_chunk, i_job = tl.program_id(0), tl.program_id(1)
    i_selected = i_job % num_selected
    place, _, first, end, used, i_row_job = job_of(sums, num_selected, first_row, num_rows, capacity, BAND)
    if first >= end:
        return
    threshold, _left, _digit, _weights = threshold_of(digits, i_row_job, chunks, used)
    o_all, o_c = tl.arange(0, MOST_CHUNKS), tl.arange(0, BLOCK_N)
    b_remaining = load_vectors(remaining, i_row_job.to(tl.int64) * chunks + o_all, o_all < used, BLOCK_N)
    b_before = tl.sum(tl.where((o_all < i_chunk)[:, None], b_remaining, 0), 0)
    if i_job < num_selected:
        # The largest count c that fits if blocks with c or more columns are kept whole; with 1, no columns remain.
        _, query_len, _, _ = load_row(sums.rows, first_row + tl.program_id(2))
        num_tiles = tl.cdiv(query_len, TILE)
        room = tl.minimum(max_stripes, tl.maximum(FEWEST_STRIPES, ROW_STRIPES // num_tiles))
        most = tl.max(tl.where(tl.sum(b_remaining, 0) <= room, 2 + o_c, 1), 0)
        count = tl.sum(tl.where(2 + o_c == most, b_before, 0), 0)
        if i_chunk > 0:  # the first block is always kept whole
            b_first = (mass_keys(tl.load(sums.totals + place + o_c)) >= threshold).to(tl.int32)
            count -= tl.where(tl.sum(b_first, 0) < most, tl.sum(b_first, 0), 0)
        i_list = (tl.program_id(2) * num_selected + i_selected).to(tl.int64)
        for start in range(first, end, CHUNK):
            o_n, b_kept, b_count = _kept_columns(sums.totals + place, start, end, threshold, BLOCK_N)
            o_block = start // BLOCK_N + tl.arange(0, CHUNK // BLOCK_N)
            b_whole = (b_count >= most) | (o_block == 0)
            tl.store(lines.whole + place // KEY_ALIGN + o_block, b_whole, mask=o_block * BLOCK_N < end)
            b_free = tl.reshape(b_kept & (b_whole[:, None] == 0), [CHUNK])
            count = append(lines.columns + i_list * max_columns, count, tl.reshape(o_n, [CHUNK]), b_free)
        if i_chunk == used - 1:
            tl.store(lines.num_columns + i_list, count)
    else:
        count = tl.max(b_before, 0)
        for start in range(first, end, CHUNK):
            o_band = start + tl.arange(0, CHUNK)
            b_band = _are_kept(sums.totals + place, o_band, end, threshold).to(tl.int32)
            upto = lines.bands_upto + (place - num_selected.to(tl.int64) * capacity)
            tl.store(upto + o_band, count + tl.cumsum(b_band, 0), mask=o_band < end)
            count += tl.sum(b_band, 0)
