# SPDX-License-Identifier: Apache-2.0
"""Common parts of reference implementations: iteration over a step in float32, means of blocks, lists of lines."""

from collections.abc import Iterator
from typing import Any

import torch

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.rows import ceil_div, split_blocks


def rows_of(call: Call) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (row, queries [query_len, num_heads, head_dim], keys [seq_len, num_kv_heads, head_dim])."""
    rows = call.rows
    for row, (token, query_len) in enumerate(zip(rows.query_starts, rows.query_lens, strict=True)):
        keys, _ = call.cache.gather(rows.block_table[row], rows.seq_lens[row])
        yield row, call.q[token : token + query_len].float(), keys.float()


def heads_of_rows(call: Call) -> Iterator[tuple[int, int, Any, torch.Tensor, torch.Tensor]]:
    """Yield (row, head, method, queries [query_len, head_dim], keys [seq_len, head_dim]) of the call's heads."""
    for row, queries, keys in rows_of(call):
        for head, method in call.heads.pairs:
            yield row, head, method, queries[:, head], keys[:, head // call.group]


def softmax_of(queries: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute Â, the softmax of some queries of a row over all keys up to their positions."""
    hidden = torch.arange(len(keys), device=keys.device) > positions[:, None]
    return ((queries @ keys.T) * scale).masked_fill(hidden, -torch.inf).softmax(-1)


def diagonal_sums(weights: torch.Tensor, positions: torch.Tensor, band: int) -> torch.Tensor:
    """Sum Â along each diagonal: by the number of blocks of ``band`` tokens from a key to a query."""
    keys = torch.arange(weights.shape[1], device=weights.device)
    distances = positions[:, None] // band - keys // band
    sums = weights.new_zeros(ceil_div(weights.shape[1], band))
    return sums.index_add_(0, distances.clamp(min=0).flatten(), weights.flatten())


def block_means(x: torch.Tensor, size: int) -> torch.Tensor:
    """Average blocks of ``size`` vectors along the first axis; the last block may have fewer."""
    counts = split_blocks(torch.ones_like(x[..., :1]), size).sum(1)
    return split_blocks(x, size).sum(1) / counts


def future_blocks(queries: torch.Tensor, keys: torch.Tensor, query_tokens: int, key_tokens: int) -> torch.Tensor:
    """Flag the key blocks that begin after the last query of a query block: [query blocks, key blocks].

    ``queries`` are the last of a row with these ``keys``. Their blocks begin with the first query.
    """
    ends = torch.arange(query_tokens, len(queries) + query_tokens, query_tokens, device=keys.device)
    last_queries = len(keys) - len(queries) + ends.clamp(max=len(queries)) - 1
    return torch.arange(0, len(keys), key_tokens, device=keys.device) > last_queries[:, None]


def set_tiles(index: SparseIndex, row: int, head: int, kept: torch.Tensor, tokens: int) -> None:
    """Write the lists of a row's tiles: the blocks of ``tokens`` keys that are flagged in ``kept`` [tiles, blocks]."""
    for i_tile, tile_kept in zip(index.rows.tiles_of(row), kept, strict=True):
        num_causal = index.rows.tile_list[i_tile].last_position // tokens + 1
        index.set_blocks(head, i_tile, tile_kept[:num_causal], tokens)


def set_lines(
    index: SparseIndex, head: int, i_tile: int, columns: torch.Tensor, diagonals: torch.Tensor, band: int,
    whole: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write one tile's lists: ``whole`` blocks and those crossed by a diagonal, and the other columns as stripes.

    ``columns`` has a flag for each key, and ``diagonals`` for each number of blocks of ``band`` tokens from a key to a
    query.
    """
    tile = index.rows.tile_list[i_tile]
    starts = torch.arange(index.num_causal_blocks(tile), device=columns.device) * index.block_tokens
    upto = torch.nn.functional.pad(diagonals.cumsum(0), (1, 0))
    nearest = (tile.position // band - (starts + index.block_tokens - 1) // band).clamp(min=0)
    kept = upto[tile.last_position // band - starts // band + 1] > upto[nearest]
    if whole is not None:
        kept |= whole[: len(kept)]
    index.set_blocks(head, i_tile, kept)
    index.set_stripes(head, i_tile, columns[: tile.position].nonzero().flatten())


def ten_bits(sums: torch.Tensor) -> torch.Tensor:
    """Convert sums >= 0 to integers of the same order, equal if mantissas agree in ten bits or values are < 2⁻⁵⁷."""
    return (sums.float().view(torch.int32) >> 13).clamp(min=(127 - 57) << 10)
