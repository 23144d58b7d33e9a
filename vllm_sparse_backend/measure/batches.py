# SPDX-License-Identifier: Apache-2.0
"""Paged caches as vLLM lays them out, with shuffled pages whose unused places are poisoned with NaN."""

from collections.abc import Sequence

import torch

from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import ceil_div


def shuffled_cache(
    seq_lens: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    layout: str = "NHD",
) -> tuple[PagedCache, torch.Tensor]:
    """A cache with room for rows of these lengths, all NaN, and their block table.

    Pages are dealt out in random order, with spare ones between. Keys and values are halves of one tensor, as in vLLM,
    of physical ``layout`` NHD or HND.
    """
    pages_needed = [ceil_div(seq_len, page_size) for seq_len in seq_lens]
    num_pages = sum(pages_needed) + 3
    shape = (num_pages, page_size, num_kv_heads, 2 * head_dim)
    if layout == "HND":
        storage = torch.full((shape[0], shape[2], shape[1], shape[3]), float("nan"), dtype=dtype, device=device)
        storage = storage.transpose(1, 2)
    else:
        storage = torch.full(shape, float("nan"), dtype=dtype, device=device)
    keys, values = storage.split(head_dim, -1)
    order = torch.randperm(num_pages, generator=generator, device=device).int()
    # One entry past each row's last page would be outside the cache: reading it is an error that shows.
    block_table = torch.full((len(seq_lens), max(pages_needed) + 1), num_pages + 7, dtype=torch.int32, device=device)
    for row, pages in enumerate(order[: sum(pages_needed)].split(pages_needed)):
        block_table[row, : len(pages)] = pages
    return PagedCache(keys, values), block_table


def write_row(cache: PagedCache, block_table_row: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put a row's keys and values [seq_len, num_kv_heads, head_dim] at its positions."""
    positions = torch.arange(len(k), device=k.device)
    slots = (block_table_row[positions // cache.page_size].long(), positions % cache.page_size)
    cache.keys[slots], cache.values[slots] = k, v
