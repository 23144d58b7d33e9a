# SPDX-License-Identifier: Apache-2.0
"""Counts of shares on the device: a histogram, a sum and the least share.

Two kinds of shares are counted. Selection adds them to tensors with a line of int64 for each row:

* ``SparseIndex.kept_shares``: the shares of attention that queries keep. Only methods with a floor for each query count
  them (``Method.counts_kept_shares``). A query is one query of one head in one layer.
* ``SparseIndex.variance_shares``: the shares of the score variance that maps to few channels hold. Only methods with
  such maps count them (``Method.counts_variance_shares``): one share for each row, kv head and layer of a step.

All fields are integers, so the counts depend neither on the order of programs nor on other rows. A line has
``SHARE_FIELDS`` numbers:

* from 0 on, the number of shares in each bucket; ``EDGES`` are the buckets' upper ends, and the last bucket ends at 1;
* at ``SUM``, the sum of the shares, in units of 1 / ``UNIT``;
* at ``LIFTED``, the number of queries that were below the floor and added blocks; 0 for other shares than kept shares;
* at ``LOST``, the largest part that is missing to a share of 1, in the same units. 0 if nothing was counted.
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

SHARE_FIELDS = Constant(16)
"""Numbers in the line of a row; numbers after ``LOST`` are 0."""

SUM, LIFTED, LOST = Constant(len(EDGES) + 1), Constant(len(EDGES) + 2), Constant(len(EDGES) + 3)
"""Fields of a row after its buckets."""

NUM_EDGES = Constant(len(EDGES))

COUNT_EVERY = 8
"""In each tile, one of this many selected heads is counted, and the next tile of a row counts the next head. To count
a head, the kernel reads the stored shares of all blocks of the tile again."""


CHUNK_ROWS = 64
"""Rows per program of ``_add_share_counts_kernel``."""


@triton.jit
def counted_head(position, TILE: tl.constexpr, EVERY: tl.constexpr):
    """Return which of EVERY consecutive selected heads is counted in a tile. Host code calls ``counted_head.fn``."""
    return position // TILE % EVERY


def count_shares(counts: torch.Tensor, shares: torch.Tensor, lifted: int) -> None:
    """Add shares to a line of counts, in plain torch."""
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
        counts: [..., SHARE_FIELDS] int64.
        others: [..., SHARE_FIELDS] int64, of the same shape.

    Returns:
        [..., SHARE_FIELDS] int64.
    """
    merged = counts + others
    lost = LOST.value
    torch.maximum(counts[..., lost], others[..., lost], out=merged[..., lost])
    return merged


def least_share(counts: list[int]) -> float | None:
    """Return the least share that was counted.

    Args:
        counts: A line of counts, on the host.
    """
    return 1 - counts[LOST.value] / UNIT.value if sum(counts[: len(EDGES) + 1]) else None


@triton.jit
def count_share(share, edges, line):
    """Add one share to a line of counts; see ``count_shares``."""
    o_f = tl.arange(0, SHARE_FIELDS)
    b_share = tl.zeros([SHARE_FIELDS], tl.float32) + share
    is_number = b_share == b_share
    b_share = tl.where(is_number, tl.minimum(tl.maximum(b_share, 0.0), 1.0), 0.0)
    b_edges = tl.load(edges + o_f, mask=o_f < NUM_EDGES, other=2.0)
    bucket = tl.sum((b_edges < b_share).to(tl.int32), 0)
    b_units = (b_share * UNIT + 0.5).to(tl.int64)
    b_added = tl.where(o_f == SUM, b_units, (o_f == bucket).to(tl.int64))
    tl.atomic_add(line + o_f, b_added, mask=is_number & (b_added != 0), sem="relaxed")
    tl.atomic_max(line + o_f, -b_units + UNIT, mask=is_number & (o_f == LOST), sem="relaxed")


def add_share_counts(row_counts: torch.Tensor, totals: torch.Tensor, i_total: int) -> None:
    """Add the counts of all rows to a line of totals, in one launch and without synchronisation.

    Args:
        row_counts: [num_rows, SHARE_FIELDS] int64 on the device, a tensor of ``SparseIndex``.
        totals: [n, SHARE_FIELDS] int64 on the same device; line ``i_total`` is written.
        i_total: Number of the line.
    """
    num_rows = row_counts.shape[0]
    _add_share_counts_kernel[(ceil_div(num_rows, CHUNK_ROWS),)](row_counts, totals, i_total, num_rows, CHUNK=CHUNK_ROWS)


@triton.jit(do_not_specialize=["i_total", "num_rows"])
def _add_share_counts_kernel(row_counts, totals, i_total, num_rows, CHUNK: tl.constexpr):
    """Add the counts of CHUNK rows per program to ``totals[i_total]``.

    Grid: (⌈num_rows / CHUNK⌉,). Bound by launch latency.

    Args:
        row_counts: [num_rows, SHARE_FIELDS] int64.
        totals: [n, SHARE_FIELDS] int64; written.
    """
    o_r = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    o_f = tl.arange(0, SHARE_FIELDS)
    b_rows = tl.load(row_counts + o_r[:, None] * SHARE_FIELDS + o_f[None, :], mask=(o_r < num_rows)[:, None], other=0)
    target = totals + i_total * SHARE_FIELDS + o_f
    tl.atomic_add(target, tl.sum(b_rows, 0), mask=o_f != LOST, sem="relaxed")
    tl.atomic_max(target, tl.max(b_rows, 0), mask=o_f == LOST, sem="relaxed")
