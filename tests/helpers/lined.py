# SPDX-License-Identifier: Apache-2.0
"""Batches whose attention has columns and diagonals, and what methods that follow such lines keep of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.batches import random_batch
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.trial import Batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def lined_batch(
    lengths: Sequence[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **more: Any,
) -> Batch:
    """A random batch whose attention has columns, every 97th key, and diagonals, some 40 tokens back."""
    batch = random_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, DEVICE, seed, **more)
    generator = torch.Generator().manual_seed(seed)
    direction = torch.nn.functional.normalize(torch.randn(head_dim - 8, generator=generator), dim=0).to(DEVICE)
    frequencies = torch.tensor([0.01, 0.037, 0.11, 0.29], device=DEVICE)
    rows = batch.rows
    for row, (token, query_len, seq_len) in enumerate(zip(rows.tokens, rows.query_lens, rows.seq_lens)):
        positions = torch.arange(seq_len, device=DEVICE)
        keys, _ = batch.cache.gather(rows.block_table[row], seq_len)
        turned = waves(positions + 40, frequencies)
        keys[..., :8] = (keys[..., :8] * 0.3 + 2.5 * turned[:, None]).to(dtype)
        keys[::97, :, 8:] += (6 * direction).to(dtype)
        pages = rows.block_table[row, positions // page_size].long()
        batch.cache.keys[pages, positions % page_size] = keys
        q = batch.q[token : token + query_len]
        strength = torch.linspace(3, 1, num_heads, device=DEVICE)[:, None]
        q[..., :8] = (q[..., :8] * 0.3 + strength * 3 * waves(positions[-query_len:], frequencies)[:, None]).to(dtype)
        q[..., 8:] += (strength.flip(0) * direction * 2).to(dtype)
    return batch


def waves(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Features whose products depend on the distance of positions alone: [n, 8]."""
    angles = positions[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


def selected(
    method: Method,
    batch: Batch,
    block_tokens: int,
    heads: Sequence[int] | None = None,
    reference: Callable[..., None] | None = None,
) -> SparseIndex:
    """What the method, or its reference, selects for ``heads`` (all unless told), in an index poisoned beforehand."""
    heads = list(range(batch.num_heads)) if heads is None else heads
    layouts = {head: method.stripe_layout(batch.rows) for head in heads}
    index = SparseIndex.allocate(batch.rows, batch.num_heads, block_tokens, layouts)
    for poisoned in (index.block_counts, index.block_ids, index.stripe_counts, index.stripe_positions):
        poisoned.fill_(-7)
    ids = torch.tensor(heads, dtype=torch.int32, device=DEVICE)
    select = type(method).select if reference is None else reference
    select(method, batch.q, batch.cache, index, ids, batch.scale)
    return index


def kept_keys(index: SparseIndex, heads: Sequence[int]) -> list[torch.Tensor]:
    """Per head and tile, which keys the tile keeps."""
    return [index.tile_keys(head, i_tile) for head in heads for i_tile in range(index.rows.num_tiles)]


def assert_between(got: list[torch.Tensor], least: list[torch.Tensor], most: list[torch.Tensor]) -> None:
    """Each bool vector of ``got`` holds all of ``least`` and nothing outside ``most``."""
    for i, (a, b, c) in enumerate(zip(least, got, most, strict=True)):
        assert not bool((a & ~b).any()), f"list {i}: keys missing"
        assert not bool((b & ~c).any()), f"list {i}: keys too many"


def single_row(batch: Batch, row: int) -> Batch:
    """One row of a batch as a batch of its own."""
    rows = batch.rows
    alone = Rows(
        (rows.tokens[row],), (rows.query_lens[row],), (rows.context_lens[row],), rows.block_table[row : row + 1]
    )
    return dataclasses.replace(batch, rows=alone)
