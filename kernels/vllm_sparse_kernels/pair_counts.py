# SPDX-License-Identifier: Apache-2.0
"""Counts, on the device, the pairs that a layer's index lists, for every layer of every step."""

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.rows import ceil_div

CHUNK_LISTS = Constant(1024)
"""Lists per program."""


def add_listed_pairs(index: SparseIndex, totals: torch.Tensor, i_total: int) -> None:
    """Add the sum of ``index.listed_pairs()`` to totals[i_total] (int64), in one launch and without synchronisation."""
    num_lists = index.block_counts.numel()
    _add_listed_pairs_kernel[(ceil_div(num_lists, CHUNK_LISTS.value),)](
        index.block_counts, index.stripe_counts, index.rows.tile_lengths, totals, i_total, num_lists,
        index.rows.num_tiles, BLOCK_N=index.block_tokens, STRIPES=index.has_stripes,
    )  # fmt: skip


@triton.jit(do_not_specialize=["i_total", "num_lists", "num_tiles"])
def _add_listed_pairs_kernel(
    block_counts, stripe_counts, tile_lengths, totals, i_total, num_lists, num_tiles,
    BLOCK_N: tl.constexpr, STRIPES: tl.constexpr,
):  # fmt: skip
    """Add Σ (blocks · BLOCK_N + stripes) · queries of the tile, over CHUNK_LISTS lists per program, to totals[i_total].

    Grid: (⌈num_lists / CHUNK_LISTS⌉,). block_counts and stripe_counts are [num_heads, num_tiles] int32, contiguous;
    tile_lengths is [num_tiles] int32. Bound by launch latency.
    """
    o_list = tl.program_id(0) * CHUNK_LISTS + tl.arange(0, CHUNK_LISTS)
    valid = o_list < num_lists
    b_keys = tl.load(block_counts + o_list, mask=valid, other=0) * BLOCK_N
    if STRIPES:
        b_keys += tl.load(stripe_counts + o_list, mask=valid, other=0)
    b_queries = tl.load(tile_lengths + o_list % num_tiles, mask=valid, other=0)
    tl.atomic_add(totals + i_total, tl.sum(b_keys.to(tl.int64) * b_queries, 0), sem="relaxed")
