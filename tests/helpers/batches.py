# SPDX-License-Identifier: Apache-2.0
"""Random batches over a shuffled paged cache, and random indices over them: for tests and the lab.

Caches have vLLM's layout, with shuffled pages. Unused places are poisoned with NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch

from vllm_sparse_kernels.call import HeadGroup
from vllm_sparse_kernels.engine_trial import Batch, Expected
from vllm_sparse_kernels.index import IndexLayout, SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import FP8, PagedCache
from vllm_sparse_kernels.rows import Rows, ceil_div
from vllm_sparse_kernels.workspace import Workspace


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
    """Return a cache with room for rows of these lengths, filled with NaN, and their block table.

    Pages are assigned in random order, with spare pages between them. As in vLLM, keys and values are halves of a
    tensor with the physical ``layout``: NHD, HND, or an order of layers, blocks, heads, tokens and elements in vLLM's
    notation. In the latter case they are the second of three layers.
    """
    pages_needed = [ceil_div(seq_len, page_size) for seq_len in seq_lens]
    num_pages = sum(pages_needed) + 3
    name = {"NHD": "LBNHC", "HND": "LBHNC"}.get(layout, layout)
    sizes = {"L": 1 if layout in ("NHD", "HND") else 3, "B": num_pages, "H": num_kv_heads, "N": page_size}
    storage = torch.full([sizes.get(axis, 2 * head_dim) for axis in name], float("nan"), dtype=dtype, device=device)
    storage = storage.permute([name.index(axis) for axis in "LBNHC"])[sizes["L"] // 2]
    keys, values = storage.split(head_dim, -1)
    order = torch.randperm(num_pages, generator=generator, device=device).int()
    # An entry past a row's last page points outside the cache, so reading it causes a visible error.
    block_table = torch.full((len(seq_lens), max(pages_needed) + 1), num_pages + 7, dtype=torch.int32, device=device)
    for row, pages in enumerate(order[: sum(pages_needed)].split(pages_needed)):
        block_table[row, : len(pages)] = pages
    return PagedCache(keys, values), block_table


def write_row(cache: PagedCache, block_table_row: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write a row's keys and values [seq_len, num_kv_heads, head_dim] to the cache."""
    positions = torch.arange(len(k), device=k.device)
    slots = (block_table_row[positions // cache.page_size].long(), positions % cache.page_size)
    cache.keys[slots], cache.values[slots] = k, v


class Placement(TypedDict, total=False):
    """Memory layout of a random batch."""

    layout: str
    """Layout of the cache, as in ``shuffled_cache``; NHD by default."""
    gap_tokens: int
    """Tokens of q between rows, filled with NaN; 0 by default."""


def random_batch(
    lengths: Sequence[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    **placement: Unpack[Placement],
) -> Batch:
    """Return rows of (context_len, query_len) with standard normal q, k, v in a ``shuffled_cache``."""
    layout, gap_tokens = placement.get("layout", "NHD"), placement.get("gap_tokens", 0)
    generator = torch.Generator(device).manual_seed(seed)
    seq_lens = [c + n for c, n in lengths]
    cache, block_table = shuffled_cache(
        seq_lens, num_kv_heads, head_dim, page_size, dtype, torch.device(device), generator, layout
    )
    tokens, next_token = [], 0
    for row, (context_len, query_len) in enumerate(lengths):
        shape = (context_len + query_len, num_kv_heads, head_dim)
        k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
        write_row(cache, block_table[row], k, v)
        tokens.append(next_token)
        next_token += query_len + gap_tokens
    q = torch.full((next_token, num_heads, head_dim), float("nan"), dtype=dtype, device=device)
    for token, (_, query_len) in zip(tokens, lengths, strict=True):
        new = torch.randn(query_len, num_heads, head_dim, generator=generator, device=device)
        q[token : token + query_len] = new.to(dtype)
    contexts, queries = zip(*lengths, strict=True)
    rows = Rows(tuple(tokens), tuple(queries), tuple(contexts), block_table)
    return Batch(q, cache, rows, head_dim**-0.5)


def on_device(batch: Batch, device: str) -> Batch:
    """Return the same batch on another device. Numbers drawn on the host are the same for every device."""
    rows, cache = batch.rows, batch.cache
    keys, values = side_by_side(cache.keys.to(device), cache.values.to(device), cache)
    moved = replace(rows, block_table=rows.block_table.to(device))
    return replace(batch, q=batch.q.to(device), cache=replace(cache, keys=keys, values=values), rows=moved)


def widened(batch: Batch, dtype: torch.dtype = torch.float16) -> Batch:
    """Return an fp8 batch with the same elements and scales in another dtype."""
    cache = batch.cache
    keys, values = side_by_side(cache.keys.to(dtype), cache.values.to(dtype), cache)
    return replace(batch, q=batch.q.to(dtype), cache=replace(cache, keys=keys, values=values))


def repaged(batch: Batch, page_size: int, layout: str) -> Batch:
    """Return the same queries, keys and values on other pages."""
    rows, cache = batch.rows, batch.cache
    lengths = list(zip(rows.context_lens, rows.query_lens, strict=True))
    other = random_batch(
        lengths, batch.num_heads, cache.num_kv_heads, cache.head_dim, page_size, batch.q.dtype, str(batch.q.device),
        1, layout=layout,
    )  # fmt: skip
    for row, seq_len in enumerate(rows.seq_lens):
        write_row(other.cache, other.rows.block_table[row], *cache.gather(rows.block_table[row], seq_len))
    moved = replace(rows, block_table=other.rows.block_table)
    return Batch(batch.q, other.cache, moved, batch.scale)


def new_index(
    rows: Rows,
    num_heads: int,
    block_tokens: int,
    stripes: Mapping[int, StripeLayout] | None = None,
    workspace: Workspace | None = None,
) -> SparseIndex:
    """Return an empty index, with room for the stripes of the heads in ``stripes``."""
    none = StripeLayout.none(rows)
    layouts = [(stripes or {}).get(head, none) for head in range(num_heads)]
    return IndexLayout.build(rows, block_tokens, layouts).new_index(workspace or Workspace(rows.device))


def random_index(batch: Batch, block_tokens: int, density: float, stripes: int = 0, seed: int = 0) -> SparseIndex:
    """Return an index that keeps each block with probability ``density``, and up to ``stripes`` random positions per
    tile.
    """
    rows, num_heads = batch.rows, batch.num_heads
    generator = torch.Generator(rows.device).manual_seed(seed)
    layouts = {h: StripeLayout.per_tile(rows, stripes) for h in range(num_heads)} if stripes else None
    index = new_index(rows, num_heads, block_tokens, layouts)
    index.block_ids.fill_(-1)
    for i_tile, tile in enumerate(rows.tile_list):
        for head in range(num_heads):
            draw = torch.rand(index.num_causal_blocks(tile), generator=generator, device=rows.device)
            index.set_blocks(head, i_tile, draw < density)
            if stripes and tile.position:
                chosen = torch.randint(
                    0, tile.position, (min(stripes, tile.position),), generator=generator, device=rows.device
                )
                index.set_stripes(head, i_tile, chosen)
    return index


def in_fp8(batch: Batch, q_scale: float = 1.0, k_scale: float = 1.0, v_scale: float = 1.0) -> Batch:
    """Return the batch rounded to fp8, whose elements are multiplied by these scales. NaN is preserved."""

    def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
        most = torch.finfo(FP8).max
        return (x.float() / scale).clamp(-most, most).to(FP8)

    cache = batch.cache
    keys, values = side_by_side(rounded(cache.keys, k_scale), rounded(cache.values, v_scale), cache)
    return Batch(
        rounded(batch.q, q_scale), PagedCache(keys, values, q_scale * k_scale, v_scale), batch.rows,
        batch.scale * q_scale * k_scale, None if batch.q.dtype == torch.float32 else batch.q.dtype,
    )  # fmt: skip


def side_by_side(keys: torch.Tensor, values: torch.Tensor, like: PagedCache) -> tuple[torch.Tensor, ...]:
    """Return copies as halves of a single tensor, as in vLLM, in the layout (NHD or HND) of another cache."""
    halves = torch.stack((keys, values), 3).flatten(3)
    if like.keys.stride(2) > like.keys.stride(1):
        halves = halves.transpose(1, 2).contiguous().transpose(1, 2)
    return halves.split(keys.shape[3], -1)


def assert_close(expected: Expected, out: torch.Tensor) -> None:
    """Check that the output is within the budget for tokens of rows, and NaN everywhere else."""
    assert torch.equal(out.isnan(), expected.out.isnan()), "NaN where there should be none, or written gaps"
    error = float((out.double() - expected.out).nan_to_num().abs().max())
    assert error <= expected.budget, f"error {error:.3e}, budget {expected.budget:.3e}"


def every_head(method: Any, num_heads: int) -> HeadGroup[Any]:
    """Return all heads of a layer, with one method."""
    return HeadGroup(tuple(range(num_heads)), (method,) * num_heads)
