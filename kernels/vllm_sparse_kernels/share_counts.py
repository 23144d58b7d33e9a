# SPDX-License-Identifier: Apache-2.0
"""Counts on the device of the shares of attention that queries keep: a histogram, a sum and the least share.

Only methods with a floor for each query count them (``Method.counts_kept_shares``). Selection adds to
``SparseIndex.kept_shares``, which has a line of int64 for each row. All fields are integers, so the counts depend
neither on the order of programs nor on other rows. A line has ``FIELDS`` numbers:

* from 0 on, the number of queries in each bucket; ``EDGES`` are the buckets' upper ends, and the last bucket ends at 1;
* at ``SUM``, the sum of their shares, in units of 1 / ``UNIT``;
* at ``LIFTED``, the number of queries that were below the floor and added blocks;
* at ``LOST``, the largest share that a query does not keep, in the same units. 0 if nothing was counted.

A query is one query of one head in one layer.
"""

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.rows import ceil_div

EDGES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Upper ends of all buckets but the last. A share that equals an end belongs to the bucket that ends there."""

UNIT = Constant(1 << 16)
"""Number of units in a share of 1."""

FIELDS = Constant(16)
"""Numbers in the line of a row; numbers after ``LOST`` are 0."""

SUM, LIFTED, LOST = Constant(len(EDGES) + 1), Constant(len(EDGES) + 2), Constant(len(EDGES) + 3)
"""Fields of a row after its buckets."""

COUNT_EVERY = 8
"""In each tile, one of this many selected heads is counted, and the next tile of a row counts the next head. To count
a head, the kernel reads the stored shares of all blocks of the tile again."""


CHUNK_ROWS = 64
"""Rows per program of ``_add_share_counts_kernel``."""


@triton.jit
def counted_head(position, TILE: tl.constexpr, EVERY: tl.constexpr):
    """Return which of EVERY consecutive selected heads is counted in a tile. Host code calls ``counted_head.fn``.

    Args:
        position: Position of the tile's first query in its sequence.
        TILE: ``TILE_TOKENS``.
        EVERY: ``COUNT_EVERY``.

    Returns:
        A number below EVERY.
    """
    return position // TILE % EVERY


def count_shares(counts: torch.Tensor, shares: torch.Tensor, lifted: int) -> None:
    """Add shares to a line of counts, in plain torch.

    Args:
        counts: [FIELDS] int64; written.
        shares: [queries] float32. Shares that are not numbers are left out; a share above 1 counts as 1.
        lifted: Number of these queries that added blocks.
    """
    shares = shares[shares.isfinite()].clamp(max=1.0)
    if not len(shares):
        return
    buckets = torch.bucketize(shares, torch.tensor(EDGES, device=shares.device))
    units = (shares * UNIT.value + 0.5).to(torch.int64)
    counts[: len(EDGES) + 1] += buckets.bincount(minlength=len(EDGES) + 1)
    counts[SUM.value] += units.sum()
    counts[LIFTED.value] += lifted
    counts[LOST.value] = torch.maximum(counts[LOST.value], UNIT.value - units.min())


def merge_counts(counts: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Combine pairs of lines of counts. Does not wait for the device.

    Args:
        counts: [..., FIELDS] int64.
        others: [..., FIELDS] int64, of the same shape.

    Returns:
        [..., FIELDS] int64.
    """
    merged = counts + others
    lost = LOST.value
    torch.maximum(counts[..., lost], others[..., lost], out=merged[..., lost])
    return merged


def least_share(counts: list[int]) -> float | None:
    """Return the least share of any counted query.

    Args:
        counts: A line of counts, on the host.

    Returns:
        The share; None if no query was counted.
    """
    return 1 - counts[LOST.value] / UNIT.value if sum(counts[: len(EDGES) + 1]) else None


def add_share_counts(row_counts: torch.Tensor, totals: torch.Tensor, i_total: int) -> None:
    """Add the counts of all rows to a line of totals, in one launch and without synchronisation.

    Args:
        row_counts: [num_rows, FIELDS] int64 on the device, ``SparseIndex.kept_shares``.
        totals: [n, FIELDS] int64 on the same device; line ``i_total`` is written.
        i_total: Number of the line.
    """
    num_rows = row_counts.shape[0]
    _add_share_counts_kernel[(ceil_div(num_rows, CHUNK_ROWS),)](row_counts, totals, i_total, num_rows, CHUNK=CHUNK_ROWS)


@triton.jit(do_not_specialize=["i_total", "num_rows"])
def _add_share_counts_kernel(row_counts, totals, i_total, num_rows, CHUNK: tl.constexpr):
    """Add the counts of CHUNK rows per program to ``totals[i_total]``.

    Grid: (⌈num_rows / CHUNK⌉,). Bound by launch latency.

    Args:
        row_counts: [num_rows, FIELDS] int64.
        totals: [n, FIELDS] int64; written.
        i_total: Line of ``totals``.
        num_rows: Number of rows.
        CHUNK: Rows of a program.
    """
    o_r = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    o_f = tl.arange(0, FIELDS)
    b_rows = tl.load(row_counts + o_r[:, None] * FIELDS + o_f[None, :], mask=(o_r < num_rows)[:, None], other=0)
    target = totals + i_total * FIELDS + o_f
    tl.atomic_add(target, tl.sum(b_rows, 0), mask=o_f != LOST, sem="relaxed")
    tl.atomic_max(target, tl.max(b_rows, 0), mask=o_f == LOST, sem="relaxed")
