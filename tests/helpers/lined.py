# SPDX-License-Identifier: Apache-2.0
"""Batches whose attention has columns and diagonals, and the keys that methods keep on them."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.helpers.batches import random_batch
from tests.helpers.masks import tile_keys
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def lined_batch(
    lengths: Sequence[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
    dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any,
) -> Batch:  # fmt: skip
    """Return a random batch whose attention has columns (every 97th key) and diagonals (about 40 tokens back)."""
    batch = random_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, DEVICE, seed, **more)
    generator = torch.Generator().manual_seed(seed)
    direction = torch.nn.functional.normalize(torch.randn(head_dim - 8, generator=generator), dim=0).to(DEVICE)
    frequencies = torch.tensor([0.01, 0.037, 0.11, 0.29], device=DEVICE)
    rows = batch.rows
    for row, (token, query_len, seq_len) in enumerate(zip(rows.query_starts, rows.query_lens, rows.seq_lens)):
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
    """Return features whose products depend only on the distance between positions: [n, 8]."""
    angles = positions[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


def kept_keys(index: SparseIndex, heads: Sequence[int]) -> list[torch.Tensor]:
    """Return the keys that each tile keeps, by head and tile."""
    return [tile_keys(index, head, i_tile) for head in heads for i_tile in range(index.rows.num_tiles)]


def assert_between(got: list[torch.Tensor], least: list[torch.Tensor], most: list[torch.Tensor]) -> None:
    """Check that each bool vector of ``got`` contains all of ``least`` and nothing outside ``most``."""
    for i, (a, b, c) in enumerate(zip(least, got, most, strict=True)):
        assert not bool((a & ~b).any()), f"list {i}: keys missing"
        assert not bool((b & ~c).any()), f"list {i}: keys too many"
