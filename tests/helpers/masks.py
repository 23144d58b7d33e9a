# SPDX-License-Identifier: Apache-2.0
"""The keys of an index as masks: slow and simple, for tests and the lab."""

import torch

from vllm_sparse_kernels.index import SparseIndex, causal_pairs


def tile_keys(index: SparseIndex, head: int, i_tile: int) -> torch.Tensor:
    """Return the keys that the tile keeps, before the causal mask: bool [last_position + 1]."""
    tile = index.rows.tile_list[i_tile]
    blocks = torch.zeros(index.num_causal_blocks(tile), dtype=torch.bool, device=index.rows.device)
    blocks[index.blocks_of(head, i_tile)] = True
    keys = blocks.repeat_interleave(index.block_tokens)[: tile.last_position + 1]
    keys[index.stripes_of(head, i_tile)] = True
    return keys


def mask_of(index: SparseIndex, row: int) -> torch.Tensor:
    """Return the kept pairs of a row, after the causal mask: bool [num_heads, query_len, seq_len]."""
    rows = index.rows
    query_len, context_len = rows.query_lens[row], rows.context_lens[row]
    mask = torch.zeros(index.num_heads, query_len, context_len + query_len, dtype=torch.bool, device=rows.device)
    for i_tile in rows.tiles_of(row):
        tile = rows.tile_list[i_tile]
        first = tile.position - context_len
        for head in range(index.num_heads):
            mask[head, first : first + tile.length_tokens, : tile.last_position + 1] = tile_keys(index, head, i_tile)
    return mask.tril_(context_len)


def density_of(index: SparseIndex) -> float:
    """Return kept divided by causal (query, key) pairs, over all rows and heads."""
    kept = sum(int(mask_of(index, row).sum()) for row in range(index.rows.num_rows))
    return kept / (index.num_heads * causal_pairs(index.rows))
